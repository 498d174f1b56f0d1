"""Tiny random models and samples for trainer tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from records.names import TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, ReadySample, Score, Verdict, VersionSpan, Vote
from trainer.model.policy import Policy

torch.set_num_threads(1)
VOCAB = 64


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random model of the Qwen3 architecture with one tokenizer file beside it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}\n")
    return folder


_loaded: dict[tuple[str, str], Policy] = {}


def load(folder: Path | str, **options) -> Policy:
    """A policy of its own for each caller; equal folders are read once, then copied."""
    settings = {"device": "cpu", "dtype": "float32", "chunk_tokens": 1024} | options
    if settings.get("recompute"):  # its layers hold functions of the model that they are in
        return Policy.load(str(folder), **settings)
    files = [file.read_bytes() for file in sorted(Path(folder).glob("*.safetensors"))]
    files.append((Path(folder) / "config.json").read_bytes())
    key = (sha256(b"".join(files)).hexdigest(), repr(sorted(settings.items())))
    if key not in _loaded:
        _loaded[key] = Policy.load(str(folder), **settings)
    return copy.deepcopy(_loaded[key])


def random_ids(generator: np.random.Generator, length: int) -> np.ndarray:
    return generator.integers(0, VOCAB, size=length).astype(np.int32)


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Sequences of uniformly random ids, the same for the same seed."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, size=n).astype(np.int32) for n in lengths]


def sample(
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    *,
    turn_id: str = "turn",
    session_id: str = "session",
    seed: int = 0,
    version: int = 0,
    temperature: float = 1.0,
    modified: str | None = None,
) -> ReadySample:
    generator = np.random.default_rng(seed)
    length = len(response_ids)
    return ReadySample(
        turn_id=turn_id,
        session_id=session_id,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=(-4.0 + generator.normal(size=length)).astype(np.float32),
        teacher_logprobs=(-3.0 + generator.normal(size=length)).astype(np.float32),
        temperature=temperature,
        distribution_modified=modified,
        version_spans=(VersionSpan(version=version, start=0, end=length),),
        hint="answer in kelvin",
        created_at=0.0,
    )


def conversation(
    session_id: str,
    lengths: Sequence[tuple[int, int]],
    *,
    seed: int,
    skip: Sequence[int] = (),
    **options,
) -> list[ReadySample]:
    """Turns that extend each other; `lengths` are (new prompt tokens, response tokens) of each.

    The new prompt tokens stand for tool output and user text. Turns in `skip` were dropped: later
    prompts contain them, but they are no samples.
    """
    generator = np.random.default_rng(seed)
    context = np.zeros(0, dtype=np.int32)
    samples = []
    for index, (added, length) in enumerate(lengths):
        prompt = np.concatenate([context, random_ids(generator, added)])
        response = random_ids(generator, length)
        if index not in skip:
            name = f"{session_id}-{index}"
            samples.append(
                sample(
                    prompt,
                    response,
                    turn_id=name,
                    session_id=session_id,
                    seed=seed * 100 + index,
                    **options,
                )
            )
        context = np.concatenate([prompt, response])
    return samples


async def make_ready(
    store: Store, samples: Sequence[ReadySample], *, teacher: str = "test"
) -> None:
    """Bring samples into the store as ready turns, through the states that every turn takes."""
    for one in samples:
        session = await store.ensure_session(
            scope="test", external_id=one.session_id, session_id=None
        )
        await store.record_turn(_captured(one, session), scope="test")
        assert await store.set_next_state(one.turn_id, [{"role": "user", "content": "kelvin!"}])
    for state in (TurnState.JUDGING, TurnState.SCORING):
        claimed = await store.claim(state, owner="seed", limit=len(samples), ttl_s=60)
        assert len(claimed) == len(samples)
        for one in samples:
            await _advance(store, state, one, teacher)


async def states(store: Store) -> dict[TurnState, int]:
    """Turns by state, without the states that no turn is in."""
    return {state: count for state, count in (await store.counts()).items() if count}


def _captured(one: ReadySample, session_id: str) -> CapturedTurn:
    return CapturedTurn(
        turn_id=one.turn_id,
        session_id=session_id,
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=[{"role": "user", "content": f"question of {one.turn_id}"}],
        tools=[],
        response={"role": "assistant", "content": f"answer of {one.turn_id}"},
        prompt_ids=one.prompt_ids,
        response_ids=one.response_ids,
        rollout_logprobs=one.rollout_logprobs,
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": one.temperature},
        distribution_modified=one.distribution_modified,
        version_spans=one.version_spans,
        finish_reason="stop",
        latency_s=0.1,
    )


async def _advance(store: Store, state: TurnState, one: ReadySample, teacher: str) -> None:
    if state is TurnState.JUDGING:
        vote = Vote(
            index=0,
            score=1,
            hint=one.hint,
            text="",
            latency_s=0.0,
            prompt_tokens=None,
            completion_tokens=None,
        )
        verdict = Verdict(
            turn_id=one.turn_id, votes=(vote,), hint=one.hint, selection="longest", judge="test"
        )
        assert await store.commit_verdict("seed", verdict, None)
        return
    score = Score(
        turn_id=one.turn_id,
        hint=one.hint,
        teacher=teacher,
        teacher_version="0",
        hinted_prompt_ids=one.prompt_ids,
        teacher_logprobs=one.teacher_logprobs,
        latency_s=0.0,
    )
    assert await store.commit_scores("seed", [score])


def rows_of_ids(vocab: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, T] and a mask [2, T] that asks for all tokens but the first."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, vocab, (2, length), generator=generator)
    mask_BT = torch.ones(2, length)
    mask_BT[:, 0] = 0
    return ids_BT, mask_BT
