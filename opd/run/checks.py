"""Checks across a run's sections: needs that nothing provides, terms that work against each other.
Made when the configuration is read, before any process starts.
"""

from __future__ import annotations

from judge.config import JudgeConfig, RewardKind
from records.training.outcome_rewards import OutcomeReward
from rollout_bridge.config import ScoringConfig
from rollout_bridge.rehearsal.config import RehearsalConfig
from trainer.config import TrainerConfig
from trainer.config_checks import leaves_stale_uncorrected, lessons_problem
from trainer.objectives.names import check_kl_terms, check_loss_mode
from trainer.objectives.options import HOW_TO_PROVIDE, HindsightOpd, Need, unmet_needs


def check_run(trainer: TrainerConfig, scoring: ScoringConfig, judge: JudgeConfig) -> None:
    """Raise ValueError, a line per problem, for an objective that this run cannot feed."""
    provided = provided_needs(trainer, scoring, judge)
    problems = unmet_needs(trainer.objective, provided)
    objective = trainer.objective
    by_engine = not trainer.teacher.in_trainer
    if objective.support == "teacher" and by_engine and 0 < scoring.top_k < objective.support_size:
        problems.append(
            f"trainer.objective.topk {objective.support_size} exceeds scoring.top_k "
            f"{scoring.top_k}: {HOW_TO_PROVIDE['teacher_topk']}"
        )
    if objective.chooses_hints and judge.selection != "shortest_first":
        problems.append(
            f"objective {objective.name!r} chooses among hints, the shortest of equals, and "
            f"judge.selection {judge.selection} gives it "
            f"{'one' if judge.selection == 'longest' else 'the longest first'}: set "
            "judge.selection = shortest_first"
        )
    problems += _outcome_problems(objective.outcome_reward, judge.reward)
    two_kl_terms = check_kl_terms(
        teacher_kl_is_loss=not isinstance(objective, HindsightOpd),
        reference_kl_coef=trainer.beta_kl,
        both_explicit="beta_kl" in trainer.model_fields_set,
    )
    problems += [two_kl_terms] if two_kl_terms is not None else []
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))


def _outcome_problems(reward: OutcomeReward | None, judged: RewardKind) -> list[str]:
    """Rewards that one section makes from outcomes and another does not."""
    if judged == "outcome" and reward != "only":
        return [
            'judge.reward = "outcome" keeps turns for the outcome of their sessions: set '
            'trainer.objective.reward_outcome = "only"'
        ]
    if judged not in ("none", "outcome") and reward == "only":
        return [
            'trainer.objective.reward_outcome = "only" trains turns that have neither hint nor '
            'votes: set judge.reward = "outcome", or reward_outcome = "add"'
        ]
    return []


def check_rehearsal(
    rehearsal: RehearsalConfig, scoring: ScoringConfig, trainer: TrainerConfig
) -> None:
    """Raise ValueError for a rehearsal whose lessons nothing would score, or could learn from."""
    if not rehearsal.enabled:
        return
    problem = lessons_problem(trainer)
    if not scoring.engine_scores:
        problem = (
            "rehearsal.enabled needs an engine that scores lessons: set scoring.engine_scores = "
            "true, or rehearsal.enabled = false"
        )
    if problem is not None:
        raise ValueError(problem)


def provided_needs(
    trainer: TrainerConfig, scoring: ScoringConfig, judge: JudgeConfig
) -> frozenset[Need]:
    """What this run's teacher and judge give the trainer."""
    provided: set[Need] = set()
    if trainer.teacher.in_trainer:
        provided |= {"teacher_scalar", "teacher_topk", "teacher_tokens", "teacher_in_trainer"}
    elif scoring.engine_scores:
        provided |= {"teacher_scalar", "teacher_tokens"}
        if scoring.top_k > 0:
            provided.add("teacher_topk")
    if judge.reward != "none":
        provided.add("reward")
    return frozenset(provided)


def run_warnings(trainer: TrainerConfig) -> list[str]:
    """Lines for what is allowed but probably not intended."""
    objective = trainer.objective
    warnings = []
    if isinstance(objective, HindsightOpd):
        line = check_loss_mode(objective.estimator, use_policy_gradient=True)
        warnings += [line] if line is not None else []
    if trainer.staleness_bound > 0 and leaves_stale_uncorrected(trainer):
        warnings.append(
            f"stale samples (up to {trainer.staleness_bound} versions) train uncorrected: set "
            "trainer.correction.importance_level = token, or trainer.max_staleness = 0"
        )
    return warnings
