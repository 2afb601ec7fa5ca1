"""Draw acceptance, tokens per round and speed against the draft budget, for every draft policy, on your own text.

    python scripts/frontier.py                                   the bundled model on the bundled document
    python scripts/frontier.py --text book.txt --json frontier.json --plot frontier.png
    python scripts/frontier.py --text book.txt --policies streaming,guided,standalone --draft-model M --no-compile
    python scripts/frontier.py --text book*.txt --context 4000 --pairs 0 --json 4k.json       acceptance alone
    python scripts/frontier.py --draw 2k.json 4k.json 8k.json --plot acceptance.png           a panel for each file

Each row of the batch continues its own stretch of the texts, --context tokens long. For every policy and budget the
same prompts are decoded plainly and speculatively in turns by one engine, whose slots keep their prefilled keys
meanwhile; speed is the ratio within such a pair, so a machine that is busy now and then changes it little. Policies
without a budget (lookup, full) are horizontal lines. --no-compile starts at once and gives the same acceptance, but no
speed that means anything. --pairs 0 decodes each point once, counts, and times nothing.

--json FILE is whole after every point. Started again with the same settings it goes on where it ended; policies and
budgets may be added. Other settings are refused; --fresh begins anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tqdm import tqdm

from common import Ledger, digest, distinct_4grams, environment, refuse
from generate import check_writable, read_text
from gpt_fast_sd import Completion, DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.model import Tokenizer, Transformer, load_model, load_tokenizer, read_config
from gpt_fast_sd.registry import heeds, policies
from gpt_fast_sd.stats import EngineStats

OVER_STANDALONE = "hierarchy/standalone"  # a hierarchy whose cheap level is the draft model; "hierarchy" has lookup
CONTEXT = 4096  # tokens of a prompt, if the text holds as many for every row
PROGRAM = "frontier.py"
Record = dict[str, Any]
Panel = tuple[str, Sequence[Record], Callable[[Record], float]]  # its name, and what it shows of each result


# ---- who drafts ------------------------------------------------------------------------------------------------------


def known_drafters() -> tuple[str, ...]:
    """All that may draft, by name."""
    return (*(policy for policy in policies() if policy != "off"), OVER_STANDALONE)


def has_a_model(drafter: str) -> bool:
    """Whether it drafts with a model of its own."""
    policy, _, cheap = drafter.partition("/")
    fields = heeds(policy)
    return "draft_model" in fields and ("cheap" not in fields or cheap == "standalone")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A policy by its name among known_drafters, and the budget it drafts with: None where it has none."""

    policy: str
    budget: int | None

    @property
    def label(self) -> str:
        """Policy and budget in one phrase."""
        return self.policy if self.budget is None else f"{self.policy} {self.budget:,}"

    def draft(self, gamma: int | str, draft_model: str | None) -> DraftConfig:
        """The configuration it stands for; ValueError where that makes no sense."""
        policy, _, cheap = self.policy.partition("/")
        changes: Record = {} if self.budget is None else {"budget": self.budget}
        if cheap:
            changes["cheap"] = cheap
        if has_a_model(self.policy):
            changes["draft_model"] = draft_model
        return DraftConfig(policy=policy, gamma=gamma, **changes)


def settings_of(policies: Sequence[str], budgets: Sequence[int]) -> list[Setting]:
    """Every policy with every budget, or once where it has none."""
    found = []
    for policy in policies:
        has_budget = "budget" in heeds(policy.partition("/")[0])
        found += [Setting(policy=policy, budget=budget) for budget in (budgets if has_budget else [None])]
    return found


def buildable(
    settings: Sequence[Setting], gammas: Sequence[int | str], draft_model: str | None
) -> tuple[list[Setting], dict[str, str]]:
    """The settings that make sense, and why the others do not, by label; ValueError where some budget has none left."""
    fine, skipped = [], {}
    for setting in settings:
        try:
            for gamma in gammas:
                setting.draft(gamma, draft_model)
            fine.append(setting)
        except ValueError as error:
            skipped[setting.label] = str(error)
    for setting in settings:
        if all(other in fine or other.budget != setting.budget for other in settings):
            continue
        if not any(other.budget == setting.budget for other in fine):
            raise ValueError(skipped[setting.label])
    return fine, skipped


def draft_with(engine: Engine, draft: DraftConfig, draft_model: Transformer | None = None) -> None:
    """Let an idle engine draft so from now on; its slots keep what was prefilled. ValueError where that cannot be."""
    engine.redraft(draft, draft_model if draft.draft_model else None)


# ---- the prompts -----------------------------------------------------------------------------------------------------


def stretches(texts: Mapping[str, Sequence[int]], n: int, length: int, bos: int | None) -> list[list[int]]:
    """n prompts of length tokens, BOS first, each its own stretch, dealt over the texts in turn.

    ValueError where a text holds too few tokens for its share.
    """
    body = length - (bos is not None)
    cuts = []
    for i, (name, ids) in enumerate(texts.items()):
        share = len(range(i, n, len(texts)))
        if share * body > len(ids):
            raise ValueError(
                f"{name} has {len(ids):,} tokens, but {share} prompt{'s' if share > 1 else ''} of {length:,} "
                f"need{'' if share > 1 else 's'} {share * body:,}: give more text, less context or a smaller batch"
            )
        gap = (len(ids) - share * body) // max(1, share)
        cuts.append([list(ids[j * (body + gap) :][:body]) for j in range(share)])
    first = [] if bos is None else [bos]
    return [first + cuts[row % len(texts)][row // len(texts)] for row in range(n)]


def longest_context(n_tokens: int, batch: int, positions: int) -> int:
    """CONTEXT, or less where text or model end before; in hundreds where that leaves much."""
    most = min(CONTEXT, n_tokens // batch + 1, positions)
    return most if most == CONTEXT or most < 200 else most // 100 * 100


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """The same prompts decoded plainly and speculatively, in turns; outputs are those of the last pair."""

    plain: list[EngineStats] = field(default_factory=list)
    speculative: list[EngineStats] = field(default_factory=list)
    plain_outputs: list[Completion] = field(default_factory=list)
    speculative_outputs: list[Completion] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Speculative over plain tokens/s, pair by pair, to the end of the last row."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return [s.decode_tokens_per_second / p.decode_tokens_per_second for p, s in pairs]

    @property
    def counts(self) -> EngineStats:
        """What all speculative runs counted; with a fixed gamma each counted the same."""
        total = EngineStats()
        for stats in self.speculative:
            for name in ("decode_tokens", "rounds", "row_rounds", "kv_bytes", "recompiles"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            for counts, more in (
                (total.drafted_by_position, stats.drafted_by_position),
                (total.accepted_by_position, stats.accepted_by_position),
            ):
                counts.extend([0] * (len(more) - len(counts)))
                for i, n in enumerate(more):
                    counts[i] += n
            for gamma, n in stats.rounds_by_gamma.items():
                total.rounds_by_gamma[gamma] = total.rounds_by_gamma.get(gamma, 0) + n
        return total


def round_ms(runs: Sequence[EngineStats]) -> dict[str, float]:
    """Milliseconds of a round, whole and by part: the median over runs, so that an interrupted one does not count."""
    parts = {"round": "decode_seconds", "draft": "draft_seconds", "verify": "verify_seconds", "host": "host_seconds"}
    return {
        part: 1e3 * statistics.median(getattr(stats, name) / stats.rounds for stats in runs)
        for part, name in parts.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def take_turns(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    n: int,
    seconds: float = 0.0,
) -> Pairs:
    """Decode the prompts both ways, after an untimed run of each; who goes first alternates.

    n pairs of runs, or more until they took so many seconds: short runs are at the mercy of what else is running.
    """
    pairs = Pairs()
    for speculate in (True, False):  # compiles what is new, and prefills what the slots do not hold yet
        engine.generate(prompts, params, speculate=speculate)
    while len(pairs.plain) < n or sum(s.decode_seconds for s in (*pairs.plain, *pairs.speculative)) < seconds:
        for speculate in (False, True) if len(pairs.plain) % 2 == 0 else (True, False):
            outputs = engine.generate(prompts, params, speculate=speculate)
            if speculate:
                pairs.speculative_outputs = outputs
                pairs.speculative.append(engine.stats)
            else:
                pairs.plain_outputs = outputs
                pairs.plain.append(engine.stats)
    return pairs


def by_position(stats: EngineStats) -> list[float]:
    """The share of judged first, second, ... drafts of a round that was accepted."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


def count_once(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], plain: Pairs
) -> Pairs:
    """Decode the prompts speculatively, once; how they are decoded plainly is known already."""
    outputs = engine.generate(prompts, params)
    return Pairs(plain.plain, [engine.stats], plain.plain_outputs, outputs)


def plain_once(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Pairs:
    """Decode the prompts plainly, once."""
    outputs = engine.generate(prompts, params, speculate=False)
    return Pairs(plain=[engine.stats], plain_outputs=outputs)


def result_of(setting: Setting, pairs: Pairs, *, timed: bool = True) -> Record:
    """One point of the frontier, JSON-ready; where nothing was timed, ratio and milliseconds are None."""
    stats = pairs.counts
    ways = {"plain": pairs.plain_outputs, "speculative": pairs.speculative_outputs}
    return {
        "policy": setting.policy,
        "budget": setting.budget,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_position": by_position(stats),
        "tokens_per_round": stats.tokens_per_round,
        "distinct_4grams": {way: distinct_4grams([c.tokens for c in outputs]) for way, outputs in ways.items()},
        "ratio": spread(pairs.ratios) if timed else None,
        "plain_ms": round_ms(pairs.plain) if timed else None,
        "speculative_ms": round_ms(pairs.speculative) if timed else None,
        "kv_bytes_per_token": {
            "plain": pairs.plain[-1].kv_bytes_per_token,
            "speculative": stats.kv_bytes_per_token,
        },
    }


# ---- the report ------------------------------------------------------------------------------------------------------

HEAD = (
    f"{'policy':<22}{'budget':>8}{'acceptance':>12}{'tokens/round':>14}  {'distinct 4-grams':<18}"
    f"{'ms/round':>8}{'plain ms':>10}{'speed':>8}"
)


def shares(found: Record) -> str:
    """Of distinct 4-grams, of both ways."""
    return ", ".join("-" if found[way] is None else f"{found[way]:.0%}" for way in ("plain", "speculative"))


def line(result: Record) -> str:
    """A result as a row under HEAD."""
    budget, ratio = result["budget"], result["ratio"]
    head = (
        f"{result['policy']:<22}{'-' if budget is None else format(budget, ','):>8}{result['acceptance_rate']:>12.1%}"
        f"{result['tokens_per_round']:>14.2f}  {shares(result['distinct_4grams']):<18}"
    )
    if ratio is None:
        return f"{head}{'-':>8}{'-':>10}{'-':>8}"
    return (
        f"{head}{result['speculative_ms']['round']:>8.2f}{result['plain_ms']['round']:>10.2f}"
        f"{ratio['median']:>7.2f}x  ({ratio['min']:.2f} to {ratio['max']:.2f})"
    )


def draw(results: Sequence[Record], title: str, path: Path) -> None:
    """Panels over the budget: acceptance, tokens a round and, where it was timed, speed with its spread."""
    timed = [r for r in results if r["ratio"]]
    panels: list[Panel] = [
        ("acceptance", results, lambda r: r["acceptance_rate"]),
        ("tokens a round", results, lambda r: r["tokens_per_round"]),
        *([("speed, times plain decoding", timed, lambda r: r["ratio"]["median"])] if timed else []),
    ]
    draw_panels([panels], title, path)


def draw_files(documents: Sequence[Record], title: str, path: Path) -> None:
    """Acceptance over the budget, a panel for each document: a row for each temperature, contexts side by side."""
    rows: dict[float, list[Panel]] = {}
    for document in sorted(documents, key=lambda d: (d["settings"]["temperature"], d["settings"]["context"])):
        settings, results = document["settings"], document["results"]
        how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        name = f"{settings['context']:,} tokens, {how}"
        rows.setdefault(settings["temperature"], []).append((name, results, lambda r: r["acceptance_rate"]))
    draw_panels(list(rows.values()), title, path)


def draw_panels(rows: Sequence[Sequence[Panel]], title: str, path: Path) -> None:
    """One grid of panels over the budget, a colour a policy; policies without a budget are horizontal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    shown = [r for row in rows for _, results, _ in row for r in results]
    colors = {policy: f"C{i}" for i, policy in enumerate(dict.fromkeys(r["policy"] for r in shown))}
    budgets = sorted({r["budget"] for r in shown if r["budget"]}) or [1]
    n_columns = max(map(len, rows))
    figure, axes = pyplot.subplots(
        len(rows), n_columns, figsize=(0.5 + 4 * n_columns, 0.8 + 3.6 * len(rows)), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis, (name, results, value) in (
        pair for n, row in enumerate(rows) for pair in zip(axes[n], row, strict=False)
    ):
        axis.set_visible(True)
        for policy, color in colors.items():
            points = sorted((r for r in results if r["policy"] == policy), key=lambda r: r["budget"] or 0)
            if not points:
                continue
            where, values = [r["budget"] for r in points], [value(r) for r in points]
            if where[0] is None:
                handles[policy] = axis.axhline(values[0], color=color, linestyle="--")
                continue
            (handles[policy],) = axis.plot(where, values, "o-", color=color, markersize=4)
            if name.startswith("speed"):
                ends = [[abs(r["ratio"][end] - r["ratio"]["median"]) for r in points] for end in ("min", "max")]
                axis.errorbar(where, values, yerr=ends, color=color, fmt="none", capsize=2, alpha=0.6)
        if name.startswith("speed"):
            axis.axhline(1.0, color="black", linewidth=0.8)
        elif name != "tokens a round":
            axis.set_ylim(0, 1.03)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        axis.set_xlim(min(budgets) / 1.2, max(budgets) * 1.2)
        axis.set_xlabel("draft budget, cache entries")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- command line ----------------------------------------------------------------------------------------------------


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number, or 0."""
    return 0 if text.strip() == "0" else whole_number(text)


def whole_numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, rising: "64,128"."""
    return sorted({whole_number(part) for part in text.split(",")})


def drafters(text: str) -> list[str]:
    """Names of those that may draft: "streaming,guided"."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known_drafters()]:
        raise argparse.ArgumentTypeError(f"there is no policy {unknown[0]!r}; there are {', '.join(known_drafters())}")
    return list(dict.fromkeys(names))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", metavar="FILE", type=Path, nargs="+", help="UTF-8 texts to continue (default: the bundled document)")
    add(
        "--model", default="bundled",
        help="'bundled', 'smollm2', a model folder, a GGUF file, or a hub id (default: bundled)",
    )  # fmt: skip
    add(
        "--context", metavar="N", type=whole_number,
        help=f"tokens of each prompt (default: {CONTEXT:,}, or what the text holds for every row)",
    )  # fmt: skip
    add("--batch-size", metavar="B", type=whole_number, default=4, help="prompts decoded together (default: 4)")
    add("--budgets", metavar="K,K", type=whole_numbers, default=[64, 128, 256, 512], help="default: 64,128,256,512")
    add(
        "--policies", metavar="P,P", type=drafters,
        help=f"among {', '.join(known_drafters())} (default: all but full, those with a draft model if there is one)",
    )  # fmt: skip
    add("--gamma", metavar="N", type=whole_number, default=4, help="tokens drafted a round (default: 4)")
    add("--new-tokens", metavar="N", type=whole_number, default=64, help="tokens to add to each prompt (default: 64)")
    add(
        "--pairs", metavar="N", type=count, default=3,
        help="pairs of timed runs for each point, 0: count acceptance only (default: 3)",
    )  # fmt: skip
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--seed", metavar="S", type=int, default=0, help="of sampling; row i draws with seed S + i (default: 0)")
    add("--draft-model", metavar="M", help="folder, GGUF file or hub id of a standalone draft model")
    add("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    add("--dtype", default="auto", help="fp32, bf16, fp16 or auto (default: auto)")
    add("--no-compile", action="store_true", help="run eagerly: the same acceptance at once, but no meaningful speed")
    add("--json", metavar="FILE", type=Path, help="keep every number here; go on from what it holds")
    add("--fresh", action="store_true", help="forget what --json holds")
    add("--plot", metavar="FILE.png", type=Path, help="draw the frontier")
    add(
        "--draw", metavar="FILE.json", type=Path, nargs="+",
        help="measure nothing: draw the acceptance that these files hold into --plot, a panel for each",
    )  # fmt: skip
    return parser.parse_args(argv)


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """ValueError now for an output that could not be written after the work."""
    check_writable(json_file, plot)
    if plot and plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw {plot}: its name must end in .png, .pdf or .svg")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "gpt_fast_sd[plot]"')


def tokens_of(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The file's tokens, no BOS."""
    ids = tokenizer.encode(read_text(path), bos=False)
    if not ids:
        raise ValueError(f"{path} is empty: give it some text")
    return ids


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs, checked."""

    engine: Engine
    draft_model: Transformer | None
    prompts: list[list[int]]
    params: list[SamplingParams]
    settings: list[Setting]
    skipped: dict[str, str]
    ledger: Ledger


def prepare(args: argparse.Namespace) -> Job:
    """Check everything that can be checked before the work; ValueError or OSError in one sentence."""
    check_outputs(args.json, args.plot)
    policies = args.policies or [
        name for name in known_drafters() if name != "full" and (args.draft_model or not has_a_model(name))
    ]
    settings, skipped = buildable(settings_of(policies, args.budgets), [args.gamma], args.draft_model)
    seeds = [(args.seed + row) % 2**63 if args.temperature else None for row in range(args.batch_size)]
    params = [
        SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature, seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    folder = locate(args.model)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, config)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer to read the text with")
    texts = {str(path): tokens_of(path, tokenizer) for path in args.text or [BUNDLED / "document.txt"]}
    room = config.n_positions - args.new_tokens
    share = -(-args.batch_size // len(texts))  # rows of a text
    context = args.context or longest_context(min(map(len, texts.values())), share, room)
    if not 2 <= context <= room:
        raise ValueError(
            f"a context of {context:,} does not fit: from 2 to {max(room, 0):,} tokens leave the model's "
            f"{room + args.new_tokens:,} positions room for {args.new_tokens:,} new ones"
        )
    prompts = stretches(texts, args.batch_size, context, tokenizer.bos_id)
    engine = Engine.from_pretrained(
        args.model,
        EngineConfig(
            batch_size=args.batch_size, max_seq_len=context + args.new_tokens, device=args.device, dtype=args.dtype,
            compile=not args.no_compile,
        ),
    )  # fmt: skip
    draft_model = None
    if args.draft_model and any(has_a_model(setting.policy) for setting in settings):
        draft_model = load_model(locate(args.draft_model), device=engine.device, dtype=engine.dtype)
    names = ("model", "batch_size", "gamma", "new_tokens", "pairs", "temperature", "seed", "draft_model")
    ledger = Ledger(
        args.json, "frontier",
        {
            **{name: getattr(args, name) for name in names}, "text": ", ".join(Path(name).name for name in texts),
            "digest": digest(prompts), "context": context, "dtype": engine.dtype_name, "compiled": engine.compiled,
        },
        environment(engine.device), fresh=args.fresh, results="results",
    )  # fmt: skip
    return Job(
        engine=engine, draft_model=draft_model, prompts=prompts, params=params, settings=settings, skipped=skipped,
        ledger=ledger,
    )  # fmt: skip


def measure(job: Job, gamma: int, draft_model: str | None, n_pairs: int) -> list[Record]:
    """Measure every setting that the ledger does not hold and print all; those that do not fit join job.skipped."""
    results, plain = [], None
    bar = tqdm(job.settings, unit="point", leave=False)
    for setting in bar:
        bar.set_description(setting.label)
        key: Record = {"policy": setting.policy, "budget": setting.budget}
        if known := job.ledger.find(key):
            results.append(known)
            bar.write(line(known))
            continue
        try:
            draft_with(job.engine, setting.draft(gamma, draft_model), job.draft_model)
        except ValueError as error:
            job.skipped[setting.label] = str(error)
            bar.write(f"skipped {setting.label}: {error}")
            continue
        if n_pairs:
            pairs = take_turns(job.engine, job.prompts, job.params, n_pairs)
        else:
            plain = plain or plain_once(job.engine, job.prompts, job.params)
            pairs = count_once(job.engine, job.prompts, job.params, plain)
        results.append(result_of(setting, pairs, timed=n_pairs > 0))
        job.ledger.put(key, results[-1])
        job.ledger.write(transformer=asdict(job.engine.model.config), skipped=job.skipped)
        bar.write(line(results[-1]))
    return results


def read_results(paths: Sequence[Path]) -> list[Record]:
    """What this program wrote into these files; ValueError where it did not."""
    documents = []
    for path in paths:
        try:
            document = json.loads(read_text(path))
        except json.JSONDecodeError:
            document = None
        if not isinstance(document, dict) or document.get("benchmark") != "frontier":
            raise ValueError(f"{path} holds no results of this program")
        documents.append(document)
    return documents


def draw_known(args: argparse.Namespace) -> None:
    """Draw the files of --draw."""
    if not args.plot:
        raise ValueError("--draw needs --plot FILE.png to draw into")
    check_outputs(None, args.plot)
    documents = read_results(args.draw)
    settings = documents[0]["settings"]
    what = f"{settings['model']}, {settings['dtype']}: acceptance of each policy, gamma {settings['gamma']}"
    draw_files(documents, f"{what}\n{settings['batch_size']} rows of {settings['text']}", args.plot)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, measure, write."""
    args = parse(argv)
    try:
        if args.draw:
            draw_known(args)
            return
        job = prepare(args)
    except (ValueError, OSError) as error:
        refuse(error, PROGRAM)
    engine, config = job.engine, job.engine.model.config
    context = len(job.prompts[0])
    what = (
        f"{args.model}, {config.n_params / 1e6:.1f} M parameters, {engine.dtype_name} on {engine.device.type}: "
        f"{args.batch_size} x {context:,} tokens, gamma {args.gamma}, "
        f"{f'temperature {args.temperature:g}' if args.temperature else 'greedy'}"
    )
    print(what)
    for label, reason in job.skipped.items():
        print(f"skipped {label}: {reason}")
    if engine.compiled:
        print("each point is compiled first, which takes some seconds ...", file=sys.stderr, flush=True)
    print(HEAD, flush=True)
    results = measure(job, args.gamma, args.draft_model, args.pairs)
    if not results:
        refuse(ValueError("no policy could be measured; the reasons are above"), PROGRAM)
    if not args.pairs:
        print("no pairs: each point was decoded once to count acceptance, and nothing was timed")
    elif not engine.compiled:
        print("not compiled: acceptance and tokens a round hold, the speeds mean little")
    if args.plot:
        draw(results, what, args.plot)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
