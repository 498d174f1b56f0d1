"""What the loop would see before any training: the judge's votes on the policy's own turns, and the
teacher under the hints.

Sessions of lab users are played in step, with one model in all three parts. It reports how many
turns are corrected, how often a turn gets a hint, how often that hint is right, and how often the
hinted model then does what the user wanted. `python -m examples.tool_lab.loop_check --model DIR
--sessions 256`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from examples.tool_lab.agent import AgentConfig, lab_episode
from examples.tool_lab.cases import GenerationRequest, Message, shown_value
from examples.tool_lab.corpus import HINT_HEADER
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.episode import Episode, Reaction
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.preferences import PREFERENCES
from judge.config import JudgeConfig
from judge.votes.parsing import parse_answer
from judge.votes.prompts import judge_messages
from judge.votes.screening import Evidence, screened
from judge.votes.selection import select_hints
from records.types import Vote

GenerateNow = Callable[[Sequence[GenerationRequest], float], list[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTurn:
    """A turn with a next state, and what the user or tool really meant by it."""

    messages: list[Message]
    response: Message
    next_state: list[Message]
    reaction: Reaction

    @property
    def is_due(self) -> bool:
        """Whether a hint is due."""
        return self.reaction.kind in ("declined", "corrected", "tool_error", "complaint")


def play(generate: GenerateNow, episodes: Sequence[Episode], max_turns: int = 24) -> list[SeenTurn]:
    """Play all episodes in step; returns every turn that got a next state."""
    seen = []
    active = list(episodes)
    for _ in range(max_turns):
        prompts = [list(episode.messages) for episode in active]
        requests = [GenerationRequest(messages=messages, tools=TOOLS) for messages in prompts]
        going_on = []
        for episode, messages, response in zip(
            active, prompts, generate(requests, 1.0), strict=True
        ):
            following = episode.observe(response)
            if following:
                going_on.append(episode)
                seen.append(
                    SeenTurn(
                        messages=messages,
                        response=response,
                        next_state=following,
                        reaction=episode.last_reaction,
                    )
                )
        active = going_on
        if not active:
            break
    return seen


def vote_hints(
    generate: GenerateNow, turns: Sequence[SeenTurn], votes: int = 3
) -> list[str | None]:
    """The hint of the longest valid of `votes` votes for each turn, or None; screened like the
    judge worker's.
    """
    config = JudgeConfig(base_url="http://in-process/v1", model="in process")
    requests = [
        GenerationRequest(
            messages=[*judge_messages(turn.messages, TOOLS, turn.response, turn.next_state)],
            tools=[],
        )
        for turn in turns
        for _ in range(votes)
    ]
    answers = [str(message.get("content") or "") for message in generate(requests, 0.6)]
    hints = []
    for number, turn in enumerate(turns):
        texts = answers[number * votes : (number + 1) * votes]
        evidence = Evidence.of([*turn.messages, turn.response], TOOLS, turn.next_state)
        cast = screened([_vote(i, text) for i, text in enumerate(texts)], evidence, config)
        best = select_hints(cast, config.selection)
        hints.append(best[0] if best else None)
    return hints


def _vote(index: int, text: str) -> Vote:
    score, hint = parse_answer(text)
    return Vote(
        index=index,
        score=score,
        hint=hint,
        text=text,
        latency_s=0.0,
        prompt_tokens=None,
        completion_tokens=None,
    )


def is_right(turn: SeenTurn, hint: str) -> bool:
    """Whether the hint asks for what the user wanted (if none is due, any hint is wrong)."""
    reaction = turn.reaction
    if reaction.preference is None or reaction.wanted is None:
        return turn.is_due
    return hint in PREFERENCES[reaction.preference].hints[reaction.wanted]


def with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """The messages with the hint on the last user message."""
    hinted = list(messages)
    index = max(i for i, message in enumerate(hinted) if message["role"] == "user")
    hinted[index] = {**hinted[index], "content": hinted[index]["content"] + HINT_HEADER + hint}
    return hinted


def check_loop(generate: GenerateNow, sessions: int, seed: int) -> dict[str, tuple[int, int]]:
    """(hits, count) of each figure; see the module's docstring."""
    config = AgentConfig()
    episodes = [lab_episode(seed * 10**6 + number, config) for number in range(sessions)]
    turns = play(generate, episodes)
    hints = vote_hints(generate, turns)
    hinted = [(turn, hint) for turn, hint in zip(turns, hints, strict=True) if hint is not None]
    corrected = [(turn, hint) for turn, hint in hinted if turn.reaction.preference is not None]
    retried = generate(
        [
            GenerationRequest(messages=with_hint(turn.messages, hint), tools=TOOLS)
            for turn, hint in corrected
        ],
        1.0,
    )
    due = [turn for turn in turns if turn.is_due]
    figures = {
        "turns_corrected": (len(due), len(turns)),
        "due_turns_hinted": (sum(turn.is_due for turn, _ in hinted), len(due)),
        "false_hints": (sum(not turn.is_due for turn, _ in hinted), len(turns) - len(due)),
        "hints_right": (sum(is_right(turn, hint) for turn, hint in hinted), len(hinted)),
        "teacher_does_as_wanted": (
            sum(_does(turn, retry) for (turn, _), retry in zip(corrected, retried, strict=True)),
            len(corrected),
        ),
    }
    for kind in sorted({turn.reaction.kind for turn in turns}):
        of_kind = [h for turn, h in zip(turns, hints, strict=True) if turn.reaction.kind == kind]
        figures[f"hinted_{kind}"] = (sum(h is not None for h in of_kind), len(of_kind))
    return figures


def _does(turn: SeenTurn, response: Mapping[str, object]) -> bool:
    assert turn.reaction.preference is not None
    return shown_value(PREFERENCES[turn.reaction.preference], response) == turn.reaction.wanted


def main() -> None:
    """Check a folder's model and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    generator = LocalGenerator.load(arguments.model)
    for name, (hits, count) in check_loop(generator, arguments.sessions, arguments.seed).items():
        print(f"{name:26s} {hits}/{count}" + (f"  {hits / count:.3f}" if count else ""))


if __name__ == "__main__":
    main()
