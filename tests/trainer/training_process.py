"""A trainer in a process of its own, to be killed: RUN MODEL STEPS. Says when it has opened."""

import asyncio
import sys
from pathlib import Path

from records.config import StoreConfig
from records.store import Store
from tests.trainer.local_engine import LocalEngine
from tests.trainer.step.test_loop import settings
from trainer.step.loop import EmbeddedTrainer


async def main(run: Path, model: str, steps: int) -> None:
    async with await Store.open(StoreConfig.sqlite(run / "records.db")) as store:
        trainer = await EmbeddedTrainer.open(
            store=store,
            config=settings(max_steps=steps),
            run_folder=run,
            model=model,
            engines={"policy": LocalEngine(model)},
        )
        print("open", flush=True)
        await trainer.run(asyncio.Event())
        await trainer.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
