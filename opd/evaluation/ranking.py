"""Versions in the order of their pass@k, for small and for large k.

A version that answers most tasks more often may still solve fewer of them in many tries. So the
order at k = 1 alone does not say which checkpoint to sample from, or to train further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd.evaluation.figures.estimates import AdaptivePasses, Passes
from opd.evaluation.figures.pass_at_k import mean_pass_at_k

FURTHER_KS = (16, 64, 256, 1024)
"""Ranked at those above the samples, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Versions with their pass@k of one metric, best first; equal ones in the order asked for.
    `is_fitted`: the Beta-binomial's, since fewer than k samples were taken; `at_the_edge`: versions
    whose fit has no maximum (all tasks equally hard, all or none passed), so it is only a bound.
    """

    metric: str
    k: int
    versions: Sequence[tuple[int, float]]
    is_fitted: bool
    at_the_edge: Sequence[int] = ()

    @property
    def order(self) -> list[int]:
        """The versions alone."""
        return [version for version, _ in self.versions]


def rankings(
    passes: Mapping[int, Mapping[str, Passes]],
    metrics: Sequence[str],
    samples: int,
    adaptive: Mapping[int, Mapping[str, AdaptivePasses]] | None,
) -> list[Ranking]:
    """Of each metric, for k = 1, the samples of each task, and FURTHER_KS. If hard tasks had
    further tries (`adaptive`), the model of all tries counts.
    """
    ks = [*sorted({1, samples}), *(k for k in FURTHER_KS if k > samples)]
    found = []
    for metric in metrics:
        for k in ks:
            is_fitted = k > samples
            fits = {
                version: (of if adaptive is None else adaptive[version])[metric].fit
                for version, of in passes.items()
            }
            values = {
                version: fits[version].model.pass_at_k(k)
                if is_fitted
                else mean_pass_at_k(list(of[metric].counts.values()), k)
                for version, of in passes.items()
            }
            edge = [version for version, fit in fits.items() if not fit.converged]
            found.append(
                Ranking(
                    metric=metric,
                    k=k,
                    versions=sorted(values.items(), key=lambda pair: -pair[1]),
                    is_fitted=is_fitted,
                    at_the_edge=edge if is_fitted else (),
                )
            )
    return found
