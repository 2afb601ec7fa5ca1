"""A stand-in for llama.cpp's server: it answers as that does, at once, and writes down how it was started."""

import sys
from pathlib import Path

PROGRAM = """#!{python}
import http.server, json, pathlib, sys

flags = sys.argv[1:]
if flags == ["--version"]:
    print("version: 0.5.0-dev (build 1, commit 0c1e570)\\nbuilt with GNU 12.2.0 for Linux x86_64", file=sys.stderr)
    sys.exit({version_code})
with pathlib.Path({started!r}).open("a") as file:
    file.write(json.dumps(flags) + "\\n")
if {last_words!r} and (not {only!r} or {only!r} in flags):
    print({last_words!r}, file=sys.stderr)
    sys.exit(1)
value = dict(zip(flags, flags[1:]))


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = asked["n_predict"]
        timings = {{
            "cache_n": 0, "prompt_n": len(asked["prompt"]), "prompt_ms": 1e-3, "predicted_n": n,
            "predicted_ms": 1e-3 * (n - 1),
        }}
        if value["--spec-type"] != "none":
            timings |= {{"draft_n": n - 1, "draft_n_accepted": (n - 1) // 2}}
        self.reply({{"tokens": [7] * n, "timings": timings}})

    def reply(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *what):
        pass


http.server.HTTPServer(("127.0.0.1", int(value["--port"])), Answer).serve_forever()
"""


def write_llama_server(folder: Path, *, version_code: int = 0, last_words: str = "", only: str = "") -> Path:
    """A folder with the program, for which it returns the file of its starts, a line of JSON each.

    last_words: what it says before it ends at its start, for every mode or only those with this flag's value.
    """
    program, starts = folder / "llama-server", folder / "started.jsonl"
    how = {"version_code": version_code, "last_words": last_words, "only": only}
    program.write_text(PROGRAM.format(python=sys.executable, started=str(starts), **how))
    program.chmod(0o755)
    return starts
