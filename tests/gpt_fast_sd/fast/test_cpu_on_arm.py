"""The kernels for any CPU, compiled for ARM's NEON by a cross compiler and run by an emulator.

Debian and Ubuntu have both: `apt install g++-aarch64-linux-gnu qemu-user`.

Shapes: B batch, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, M rows, I inputs,
        O outputs.
"""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import build as cpu_build
from gpt_fast_sd.fast.cpu import linear as cpu_linear
from gpt_fast_sd.fast.cpu import prebuild as beforehand
from gpt_fast_sd.fast.cpu import round as cpu_round
from gpt_fast_sd.fast.cpu import sampling as cpu_sampling
from gpt_fast_sd.sampling import draw, probabilities
from tests.gpt_fast_sd.fast.dense import BF16, FP16, FP32
from tests.gpt_fast_sd.fast.test_cpu import Case
from tests.gpt_fast_sd.fast.test_cpu_any import check_products, is_close, noise
from tests.helpers import form_of, table_of

COMPILER, EMULATOR, OWN_COMPILER = (shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64", "g++"))
LEAST, WITH_DOTS = "-march=armv8-a", "-march=armv8.2-a+dotprod"  # the least CPU that has NEON; dot products of bytes
HERE = "-DUSE_DOT4 -march=native"  # on this CPU, where plain expressions take the place of those dot products
needs_both = pytest.mark.skipif(not (COMPILER and EMULATOR), reason="no cross compiler and emulator for ARM")
ARM = pytest.mark.slow, needs_both
on_linux = pytest.mark.skipif(not (OWN_COMPILER and sys.platform == "linux"), reason="no g++ with OpenMP")


def program(source: Path, head_dim: int, to: Path, kind: str = LEAST) -> Path:
    """The kernel with a program around it."""
    compiler = OWN_COMPILER if kind == HERE else COMPILER
    assert compiler
    plain = next(iter(kernels.sets_of_this_kind().values()))
    named = {cpu_sampling.SOURCE: "#define SAMPLES\n", cpu_round.SOURCE: "#define DRAWS\n"}.get(source, "")
    code = named + cpu_build.text(source, head_dim, plain) + Path(__file__).with_name("on_arm.cpp").read_text()
    flags = *kind.split(), *(["-static"] if compiler == COMPILER else [])
    command = [compiler, *beforehand.FLAGS, "-fopenmp", *flags, "-x", "c++", "-", "-o", str(to)]
    done = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
    assert not done.returncode, done.stderr
    return to


def run(built: Path, sizes: list[int], arrays: list[Tensor | None], kind: str = LEAST) -> bytes:
    by = [] if kind == HERE else [str(EMULATOR)]
    given = [torch.tensor(sizes), *arrays, *[None] * (9 - len(arrays))]
    raw = [b"" if x is None else x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for x in given]
    said = b"".join(len(one).to_bytes(8, "little") + one for one in raw)
    return subprocess.run([*by, str(built)], input=said, capture_output=True, check=True).stdout


@pytest.mark.slow
@needs_both
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_attention_is_that_of_fp64(head_dim: int, tmp_path: Path) -> None:
    built = program(cpu.ANY, head_dim, tmp_path / "attend")
    for dtype, form in itertools.product((FP32, FP16, BF16), ("own", "int8")):
        case = Case([6, 2071], form=form_of(dtype).name if form == "own" else form, dtype=dtype, n_tokens=2,
                    head_dim=head_dim, n_keys=2112, whole=False)  # fmt: skip
        q, layer, scales = case.q.contiguous(), case.layer(), (case.k_scale, case.v_scale)
        of_scales = [0, 0] if scales[0] is None else scales[0].stride()[:2]
        for index in (None, case.seen()):
            sizes = [
                q.nbytes, 0 if index is not None else 2 * 2 * 2112 // 16 * 4, 2, 2, 2, 2, 2112, 2112, *q.stride()[:3],
                *layer.k.stride()[:2], *of_scales, 0, cpu.DTYPES[dtype], cpu.DTYPES[layer.k.dtype],
            ]  # fmt: skip
            said = run(built, sizes, [q, layer.k, layer.v, *scales, None, None, case.pos, index])
            assert is_close(torch.frombuffer(bytearray(said[: sizes[0]]), dtype=dtype).view(q.shape), case)
            if index is None:
                mass = torch.frombuffer(bytearray(said[sizes[0] :]), dtype=FP32).view(2, 2, -1)
                torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 4.0), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "kind", [pytest.param(LEAST, marks=ARM), pytest.param(WITH_DOTS, marks=ARM), pytest.param(HERE, marks=on_linux)]
)
def test_products_are_their_references(kind: str, tmp_path: Path) -> None:
    built, n_in, n_out = program(cpu_linear.ANY, 0, tmp_path / "multiply", kind), 576, 96

    def product(x: Tensor, *weights: Tensor | None, gated: bool = False, by_sums: int = False) -> Tensor:
        width = n_out // 2 if gated else n_out
        sizes = [2 * len(x) * width, 0, len(x), n_in, n_out, n_in, gated, by_sums]
        return torch.frombuffer(bytearray(run(built, sizes, [x, *weights], kind)), dtype=BF16).view(len(x), width)

    check_products(product, n_in, (1, 3, 8, 50))


@pytest.mark.slow
@needs_both
def test_what_is_drawn_is_what_tensors_keep_and_draw(tmp_path: Path) -> None:
    built, n_vocab = program(cpu_sampling.SOURCE, 0, tmp_path / "sample"), 9001
    filters = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 3000, "top_p": 0.97, "min_p": 0.01}]
    n, u = len(filters), torch.arange(5) / 5 + 0.05
    logits = noise(n, n_vocab, seed=1) * 3
    held = table_of([SamplingParams(temperature=0.8, **one) for one in filters], n_vocab)  # type: ignore[arg-type]
    expected = probabilities(logits, held)
    least = held.min_p.log()
    said = run(built, [4 * n * n_vocab, 0, n, n_vocab], [logits, held.temperature, held.top_k, held.top_p, least])
    p = torch.frombuffer(bytearray(said), dtype=FP32).view(n, n_vocab)
    assert (p > 0).equal(expected > 0)
    torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-37)
    drawn = run(program(cpu_round.SOURCE, 0, tmp_path / "draw"), [8 * n, 0, n, n_vocab], [p, u])
    assert torch.frombuffer(bytearray(drawn), dtype=torch.int64).equal(draw(p, u))


@pytest.mark.slow
@needs_both
def test_all_layers_of_a_step_compile(tmp_path: Path) -> None:
    """They are not run: they call the kernels above, which a program of the emulator would have to load."""
    assert COMPILER
    plain = next(iter(kernels.sets_of_this_kind().values()))
    command = [COMPILER, *beforehand.FLAGS, "-Werror", "-Wall", "-fopenmp", "-march=armv8-a", "-x", "c++", "-c", "-"]
    code = cpu_build.text(cpu_linear.LAYERS, 0, plain)
    done = subprocess.run([*command, "-o", str(tmp_path / "layers.o")], input=code, text=True, capture_output=True)
    assert not done.returncode, done.stderr
