"""What the judge's counters come to."""

from __future__ import annotations

from judge.metrics import HintMetrics
from records.names import DropReason, HintRejection


def hint_figures(metrics: HintMetrics) -> dict[str, float]:
    """The figures under the specification's names; ratios and means are left out while
    undefined.
    """
    turns, accepted = _value(metrics, "hint_turns_total"), _value(metrics, "hint_accepted_total")
    figures = {
        f"hint/{name}": _value(metrics, f"hint_{name}_total")
        for name in ("vote_none", "vote_pos", "vote_neg", "vote_failed")
    }
    if turns:
        figures["hint/accept_rate"] = accepted / turns
        figures["hint/split_rate"] = _value(metrics, "hint_votes_split_total") / turns
    votes = sum(figures[f"hint/vote_{kind}"] for kind in ("none", "pos", "neg"))
    answered = votes - figures["hint/vote_failed"]
    if answered:
        abstained = figures["hint/vote_none"] - figures["hint/vote_failed"]
        figures["hint/abstain_rate"] = abstained / answered
    if compared := _value(metrics, "hint_agreement_turns_total"):
        figures["hint/agreement"] = _value(metrics, "hint_agreement_total") / compared
    if accepted:
        figures["hint/len_chars"] = _value(metrics, "hint_len_chars_total") / accepted
        figures["hint/minority_rate"] = _value(metrics, "hint_minority_total") / accepted
    rewards = {
        f"reward/{name}": _value(metrics, f"reward_{name}_total")
        for name in ("positive", "zero", "negative", "without_hint")
    }
    if any(rewards.values()):
        figures |= rewards
    for reason in DropReason:
        number = metrics.registry.get_sample_value("hint_dropped_total", {"reason": reason.value})
        if number is not None:
            figures[f"hint/dropped_{reason.value}"] = number
    for reason in HintRejection:
        labels = {"reason": reason.value}
        number = metrics.registry.get_sample_value("hint_rejected_total", labels)
        if number:
            figures[f"hint/rejected_{reason.value}"] = number
    return figures


def _value(metrics: HintMetrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name)
    assert value is not None, name
    return value
