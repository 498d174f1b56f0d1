"""How the judge's answers about hints fall out, for the process that is running."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from judge.votes.voting import Ballot


class QuestionMetrics:
    """Counters of the questions about hints, and of what examinations came to."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.answers = Counter(
            "hint_question",
            "Questions about hints, by what most votes say; too_long: it did not fit",
            ["question", "answer"],
            registry=self.registry,
        )
        self.examined = Counter(
            "hint_examined",
            "Hints examined, by what came of it",
            ["outcome"],
            registry=self.registry,
        )
        self.refused_texts = Counter(
            "hint_text_refused",
            "Texts for exceptions of hints that are not used, by reason",
            ["reason"],
            registry=self.registry,
        )

    def count(self, question: str, ballot: Ballot | None, answer: object) -> None:
        """One question; `answer` None: no majority."""
        said = "too_long" if ballot is None else "none" if answer is None else str(answer).lower()
        self.answers.labels(question=question, answer=said).inc()
