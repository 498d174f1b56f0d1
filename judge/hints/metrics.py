"""Counts of the judge's answers about hints, in the running process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from judge.votes.voting import Ballot


class QuestionMetrics:
    """Counters of the questions about hints and of the results of examinations."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.answers = Counter(
            "hint_question",
            "Questions about hints, by the majority's answer; too_long: it did not fit",
            ["question", "answer"],
            registry=self.registry,
        )
        self.examined = Counter(
            "hint_examined",
            "Hints examined, by result",
            ["outcome"],
            registry=self.registry,
        )
        self.refused_texts = Counter(
            "hint_text_refused",
            "Unused texts for exceptions of hints, by reason",
            ["reason"],
            registry=self.registry,
        )

    def count(self, question: str, ballot: Ballot | None, answer: object) -> None:
        """One question; `answer` None: no majority."""
        said = "too_long" if ballot is None else "none" if answer is None else str(answer).lower()
        self.answers.labels(question=question, answer=said).inc()
