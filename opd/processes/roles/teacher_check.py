"""Whether each further teacher reads the policy's tokens as the policy does, before it scores."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from opd.processes.shared import client_of
from opd.run.config import EngineConfig, RunConfig
from trainer.model.model_config import model_vocab_size

if TYPE_CHECKING:
    from rollout_bridge.rendering.rendering import Rendering

logger = logging.getLogger(__name__)


async def check_teachers(config: RunConfig, rendering: Rendering, names: Collection[str]) -> None:
    """Compare each engine of these further teachers with the policy's model, and log what differs
    if that is allowed. Raises StartupError for a difference, EngineError.
    """
    scoring = config.scoring
    if not names:
        return
    # These load torch, which a judge process otherwise does without.
    from opd.models.compatibility import check_teacher
    from rollout_bridge.rendering.calibration_texts import conversation_sequences

    sequences = conversation_sequences(rendering)
    for name in names:
        for url in scoring.urls_of_teacher(name):
            engine = EngineConfig(url=url, api_key=scoring.teacher_api_keys.get(name))
            async with client_of(config, engine) as client:
                differences = await check_teacher(
                    name,
                    client,
                    model=config.model,
                    # A tokenizer may name ids that its model has no rows for (Gemma 3's image), and
                    # a model may have rows that no text uses.
                    vocab_size=min(rendering.vocab_size, model_vocab_size(config.model)),
                    sequences=sequences,
                    template_ids=sorted(rendering.stop_token_ids),
                    allow=scoring.allow_incompatible_teachers,
                )
            for difference in differences:
                logger.warning("teacher %s at %s: %s", name, url, difference)
