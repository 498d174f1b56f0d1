"""Rollout correction: importance weights, rejection and veto for samples from another policy.

Formulas: ALGORITHMS 4. The one entry is `correct_rollout` in `correct`; options are in `settings`,
and what a configuration calls them in `config`.
"""
