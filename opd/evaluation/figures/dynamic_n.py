"""More tries for hard problems: sample until a problem is solved, or a cap.

Rule: ALGORITHMS 8.3. The stopping rule biases c/n upwards (the last try is always a success), so
estimates come from the fitted model's posterior, not from the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """Stop after `successes` successes or `max_tries` tries."""

    successes: int = 1
    max_tries: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.successes <= self.max_tries:
            raise ValueError(
                f"a stopping rule needs 1 <= successes <= max_tries, got {self.successes} and "
                f"{self.max_tries}"
            )

    def next_tries(self, c: int, n: int, *, batch: int = 1) -> int:
        """How many tries to make next, at most `batch`, given c successes in n; 0 to stop."""
        if batch < 1 or not 0 <= c <= n:
            raise ValueError(
                f"expected batch >= 1 and 0 <= c <= n, got batch={batch}, c={c}, n={n}"
            )
        if c >= self.successes:
            return 0
        return max(0, min(batch, self.max_tries - n))
