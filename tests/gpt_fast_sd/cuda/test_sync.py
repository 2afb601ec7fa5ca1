"""Nothing that a round does on the device makes the host wait, or brings tensors of two devices together."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gpt_fast_sd.draft import draft_step
from gpt_fast_sd.policies import build_policy
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.serving.launch import Rounds
from gpt_fast_sd.state import RoundPlan
from gpt_fast_sd.steps import size_carrier
from measuring.replay import Replay
from tests.drafts import POLICIES, VIEWS, draft_of, given
from tests.gpt_fast_sd.cuda.rig import CAPACITY, SLOTS, Rig, fake_rig
from tests.gpuless.fakecuda import fake_cuda_tensors, needs_fake_cuda
from tests.gpuless.recorder import waits
from tests.helpers import few

pytestmark = needs_fake_cuda

GAMMA = 5
TO_CAPTURE = RoundPlan(gamma=GAMMA, n_keys=CAPACITY - GAMMA, captured=True)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with fake_cuda_tensors(), torch.inference_mode():
        yield fake_rig()


@pytest.mark.parametrize("name", VIEWS)
def test_a_draft_step_and_its_view_do_not_wait(rig: Rig, name: str) -> None:
    view, cache, token = rig.view(name), rig.cache, rig.tokens(1)
    make, args = view.kv()
    assert waits(lambda: view.device_refresh(rig.state, CAPACITY)) == []
    assert waits(lambda: view.device_before_draft(rig.state, TO_CAPTURE)) == []
    given = rig.model, token, token.clone(), cache.layers, size_carrier(cache, CAPACITY), make, args, rig.state.bodies
    assert waits(lambda: draft_step(*given)) == []
    mass = torch.zeros(*cache.shape, CAPACITY // 64, device=cache.seq_len.device)
    assert waits(lambda: view.device_after_verify(rig.state, mass if view.wants_mass else None)) == []


KINDS = [Kind(False, False), Kind(True, False), Kind(True, True)]
OVER_PLANES = ["quantized", "quest x planes", "snapkv x planes", "guided x planes"]
OTHERS = ["past its positions", *OVER_PLANES]
SOME = [*((name, KINDS[(2 * i) % 3]) for i, name in enumerate(POLICIES)), *((name, KINDS[0]) for name in OTHERS)]


@pytest.mark.parametrize(("name", "kind"), few(itertools.product([*POLICIES, *OTHERS], KINDS), SOME), ids=str)
@pytest.mark.usefixtures("rig")
def test_a_whole_round_does_not_wait(name: str, kind: Kind) -> None:
    rig, config = fake_rig(form="planes" if name in OVER_PLANES else "bf16"), draft_of(name, GAMMA)
    if config.view_name is not None:
        config = replace(config, budget=24 if name == "past its positions" else 512)
    target = rig.runner
    policy = build_policy(config, target, given(name, fake_rig().model) if config.draft_model else None)
    rounds = Rounds(target, rig.state, policy, config)
    rounds.replay = Replay(torch.zeros(100, SLOTS, dtype=torch.int64, device=rig.cache.seq_len.device))
    rounds._look = lambda what, wrong: None  # type: ignore[method-assign]  # which it does at the first drafts alone
    plan = replace(TO_CAPTURE, kind=kind)
    assert waits(lambda: rounds.device_round(plan)) == []
