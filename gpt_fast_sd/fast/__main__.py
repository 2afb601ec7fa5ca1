"""Say which bodies do not stand for the core as it is; --write: they were brought up to date. See marks.py."""

import sys

from . import choose, marks

if __name__ == "__main__":
    assert choose, "it imports every body"
    if sys.argv[1:] == ["--write"]:
        marks.write()
    elif sys.argv[1:]:
        sys.exit(f"expected --write or nothing, got {' '.join(sys.argv[1:])}")
    changed = [(name, body) for body, names in sorted(marks.STANDS_FOR.items()) for name in marks.edited_of(names)]
    for name, body in changed:
        print(f"{name} changed: bring {body} up to date, then its mark")
    sys.exit(bool(changed))
