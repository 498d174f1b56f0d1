"""A plan as text: the layout drawn, every file, every command. Pure."""

from __future__ import annotations

import shlex
import sys

from opd.cluster.files import config_text
from opd.cluster.going_back import set_aside_line
from opd.cluster.layout import Layout
from opd.cluster.plan import LaunchPlan, engine_overrides

WIDTH = 96


def show(plan: LaunchPlan) -> str:
    """What a launch of this plan would write and run."""
    parts = [
        f"run folder  {plan.paths.run} ({'resumes' if plan.resumes else 'new'})",
        *([] if plan.back is None else [*plan.back.said(), set_aside_line(plan.back, plan.paths)]),
        plan.flags.text,
        *(f"warning: {line}" for line in plan.warnings),
        "",
        "== layout",
        draw(plan.layout),
        describe(plan),
        "",
        f"== file {plan.paths.config} (all values; shown are those that are not defaults)",
        config_text(plan.config),
    ]
    parts += [f"== file {plan.paths.ray_token} (a random secret, once for each run)", ""]
    for path, text in plan.files.items():
        note = "" if path != plan.paths.custom_yaml else " (a resumed run counts on: not 0)"
        parts += [f"== file {path}{note}", text]
    return "\n".join([*parts, *_commands(plan)]) + "\n"


def draw(layout: Layout) -> str:
    """A row for each node, a column for each of its GPUs."""
    rows = [
        [f"node {node}"]
        + [layout.owner(node * layout.gpus_per_node + gpu) for gpu in range(layout.gpus_per_node)]
        for node in range(layout.nodes)
    ]
    rows.insert(0, ["", *(f"GPU {gpu}" for gpu in range(layout.gpus_per_node))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def describe(plan: LaunchPlan) -> str:
    """The layout in words: copies of the model, engines, and who judges."""
    actor = plan.cluster.actor
    lines = [
        f"trainer: {actor.gpus} GPUs, {actor.data_parallel} x (tensor {actor.tensor_parallel}, "
        f"pipeline {actor.pipeline_parallel}, context {actor.context_parallel}), "
        f"expert {actor.expert_parallel}"
    ]
    for name, engines in plan.layout.engines.items():
        lines.append(f"{name}: {len(engines)} engines of {engines[0].gpus} GPUs")
    steps = plan.config.trainer.epochs_per_batch
    if steps > 1:
        lines.append(f"steps on a batch: {steps} (trainer.epochs_per_batch)")
    if plan.config.trainer.side_source is not None:
        size = plan.config.trainer.objective.support_size
        lines.append(
            f"side samples: {size} per position, by the policy's engines when a turn is scored"
        )
    if plan.config.rehearsal.enabled:
        trainer = plan.config.trainer
        size = trainer.rollout_batch_size
        counter, keep = trainer.lesson_shares.of(size)
        lines.append(
            f"lessons: while a hint is practised, {counter} of {size} samples "
            f"preserve open wishes and {keep} everything else (rehearsal.enabled)"
        )
    if plan.routing is not None:
        replay, why = plan.routing
        lines.append(f"routing replay: {replay} ({why})")
    lines.append(f"judge model: {plan.config.judge.model}")
    return "\n".join(lines)


def wrap(words: list[str]) -> str:
    """A command line for a shell; a long one is broken between flags."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    lines = [""]
    for group in groups:
        text = " ".join(group)
        if lines[-1] and len(lines[-1]) + len(text) > WIDTH:
            lines.append("")
        lines[-1] += text if not lines[-1] else f" {text}"
    return " \\\n    ".join(lines)


def _commands(plan: LaunchPlan) -> list[str]:
    commands = plan.commands
    addresses = {name: f"ADDRESS_OF_{name.upper()}" for name in plan.layout.engines}
    words = engine_overrides(plan.config, addresses)
    shown = ["== command: Ray's head, here", wrap(commands.ray_head), ""]
    if plan.cluster.nodes > 1:
        shown += [
            f"== command: on each other node ({plan.cluster.nodes - 1}), by you",
            wrap(commands.ray_worker),
            "",
        ]
    submit = commands.submit[: commands.submit.index("--") + 3]
    shown += ["== command: the job", wrap(submit)]
    for title, flags in plan.sections.items():
        if flags:
            shown += [f"  # {title}", wrap_flags([word for flag in flags for word in flag])]
    return [
        *shown,
        "",
        f"== command: the endpoint, once {plan.paths.engines} has the engines' addresses",
        wrap([sys.executable, *commands.proxy, *words]),
        "",
        "== command: judge and scoring workers, then too",
        wrap([sys.executable, *commands.judge, *words]),
        "",
        "== command: at the end, or when you press Ctrl-C",
        wrap(commands.stop_job),
    ]


def wrap_flags(words: list[str]) -> str:
    """Flags of one section, indented under its title."""
    return "    " + wrap(words)
