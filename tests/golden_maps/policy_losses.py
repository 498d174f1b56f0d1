"""Policy-gradient losses, reductions and the limit of staleness.

Files: `verl091_policy_loss`, `verl091_agg_loss`, `slime_policy_loss_family`,
`seed_pure_is_loss_418f`, `staleness_limit`.
"""

from __future__ import annotations

from collections.abc import Iterator

from records.training.staleness import admit, max_requests
from tests.golden_maps.check import Case, Comparison, GoldenMap, Meta
from tests.golden_maps.policy_pure_is import pure_is_loss
from tests.golden_maps.policy_slime import policy_losses
from tests.golden_maps.policy_verl import aggregation, policy_loss


def staleness(case: Case, meta: Meta) -> Iterator[Comparison]:
    """The largest number of requests, and whether one more may start."""
    batch, version, eta = case["B"], case["version_i"], case["eta"]
    most = max_requests(batch_size=batch, version=version, eta=eta)
    yield Comparison(name="max_N_r", ours=most, reference=case["max_N_r"])
    for check in case["check"]:
        yield Comparison(
            name=f"N_r={check['N_r']}",
            ours=admit(check["N_r"], batch, version, eta),
            reference=check["allowed"],
        )


MAPS: dict[str, GoldenMap] = {
    "seed_pure_is_loss_418f": pure_is_loss,
    "slime_policy_loss_family": policy_losses,
    "staleness_limit": staleness,
    "verl091_agg_loss": aggregation,
    "verl091_policy_loss": policy_loss,
}
