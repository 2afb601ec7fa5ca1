"""The claims of README and docs/: links resolve, code runs, commands have the flags they name, figures are of a run."""

import importlib
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams, registry
from gpt_fast_sd.round import Round
from maintain import results
from tests.gpt_fast_sd.test_speculation import speculation_changes_nothing

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "gpt_fast_sd/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def block_after(mark: str, page: str) -> str:
    found = re.search(rf"^<!-- {re.escape(mark)} -->\n```\w+\n(.*?)\n```$", text_of(page), re.S | re.M)
    assert found, f"{page} has no block after <!-- {mark} -->"
    return found[1]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    for match in LINK.finditer(re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.S)):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (ROOT / page).parent / target if target else ROOT / page
        assert there.resolve().is_relative_to(ROOT) and there.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), f"{page}: {target}#{anchor}"


def test_readme_shows_the_round_as_it_is() -> None:
    assert block_after("round.py", "README.md") == textwrap.dedent(inspect.getsource(Round.device_round)).rstrip("\n")


def test_the_policy_that_a_page_adds_changes_nothing_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    exec(compile(block_after("test: a policy", "docs/adding_a_policy.md"), "docs/adding_a_policy.md", "exec"), {})
    assert registry.policies()[-1] == "stutter"
    assert speculation_changes_nothing("stutter", 3, 2)


@pytest.mark.parametrize("page", ["README.md", "docs/use.md"])
def test_python_that_a_page_shows_names_what_there_is(page: str) -> None:
    classes: dict[str, Any] = {one.__name__: one for one in (EngineConfig, DraftConfig, SamplingParams)}
    found = set()
    for code in re.findall(r"```python\n(.*?)```", text_of(page), re.S):
        compile(code, page, "exec")
        for name, arguments in re.findall(rf"({'|'.join(classes)})\(([^()]*)\)", code):
            eval(f"{name}({arguments})", classes | {"never_the_same_twice": max})
            found.add(name)
    assert found == {*classes}


@pytest.mark.slow
def test_python_that_shows_how_it_is_used_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```python\n(.*?)```", text_of("docs/use.md"), re.S):
        exec(compile(code, "docs/use.md", "exec"), {})
    said = capsys.readouterr().out
    assert "Bob cancelled" in said and "Ann length 200" in said and "Cleo length 200" in said


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of the pages that runs a program of ours: the page, and its words."""
    for page in PAGES:
        if page == "CHANGELOG.md":
            continue
        blocks = re.findall(r"```bash\n(.*?)```|((?:^    .*\n)+)", text_of(page), re.S | re.M)
        for block in ("".join(pair) for pair in blocks):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r" *(?:python|torchrun) .*?\b(scripts/[\w/]+\.py[^`]*)$", line):
                    yield page, shlex.split(found[1], comments=True)


@pytest.mark.parametrize("program", sorted({words[0] for _, words in commands()}))
def test_a_command_of_a_page_has_the_flags_that_it_names(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    with pytest.raises(SystemExit):
        (module.parse if hasattr(module, "parse") else module.main)(["--help"])
    known = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out)}
    for page, words in commands():
        if words[0] == program:
            named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            assert named <= known, f"{page}: {' '.join(words)}"


def test_pages_of_results_readme_and_its_plot_are_what_the_newest_results_make() -> None:
    for file in (ROOT / "benchmarks" / "cpu").glob("*/set.json"):
        assert results.page(file.parent) == text_of(f"{file.parent}/README.md")
    folder = results.newest()
    assert folder and results.front(folder, text_of("README.md")) == text_of("README.md")
    assert text_of("docs/hero.svg") == text_of(f"{folder}/long.svg")


def test_what_a_cpu_recorded_is_what_readme_says_of_it() -> None:
    events = "".join(json.loads(line)[2] for line in text_of("docs/terminal.cast").splitlines()[1:])
    found = re.search(r"tokens/s +([\d.]+) +([\d.]+) +([\d.]+) x", events)
    assert found
    said = re.search(r"docs/terminal\.svg\" alt=\"([^\"]*)\"", text_of("README.md"))
    assert said and all(number in said[1] for number in found.groups())


def test_what_readme_says_of_gpus_is_true() -> None:
    said, lines = text_of("README.md").split("## Run it")[0], text_of("benchmarks/h200/README.md").splitlines()
    stages = json.loads(text_of("benchmarks/h200/2026-11-27/results.json"))["stages"]
    cells = {one["result"].get("quantize") or "bf16": one["result"] for one in stages if "batch" in one["result"]}
    assert "replay" in said and len(cells) == 3
    for weights, one in cells.items():
        speed, steps = f"{one['ratio']['median']:.2f}x", one["steps"]
        assert (speed in said or weights == "planes") and steps["target"]["rows_active"] == one["batch"]
        row = next(row for row in lines if f"{one['batch']}, {weights} | {one['gamma']} " in row)
        shares = [one["roofline"][name] / steps[name]["seconds"] for name in ("target", "draft")]
        numbers = [f"{steps[name]['seconds'] * 1e3:.2f} ms" for name in ("target", "draft", "verify")]
        numbers += [*(f"{share:.0%}".replace("%", " %") for share in shares), speed]
        numbers += [f"{one[way + '_tokens_per_second']:,.0f}" for way in ("plain", "replayed")]
        numbers.append(f"{steps['verify']['seconds'] / steps['target']['seconds']:.2f} T_T")
        assert all(number in row for number in numbers), (row, numbers)
