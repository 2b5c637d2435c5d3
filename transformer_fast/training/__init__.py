"""Training: losses, schedules, batches, checkpoints and a loop.

    sampler = training.TokenBatches(lengths, max_tokens=4096)
    loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=training.PairCollator(0, 1, 2))
    optimizer = training.adamw(model)
    trainer = training.Trainer(
        model, optimizer, training.NextTokenLoss(pad_token=0),
        schedule=training.paper_schedule(optimizer, d_model=512), checkpoint="run.pt",
    )
    trainer.resume()
    trainer.fit(loader, epochs=10, validation=other_loader)

The parts also work in your own loop. For ``torchrun`` add `process_group` and `parallelise`.
"""

from .batches import *
from .checkpoint import *
from .loss import *
from .optimizer import *
from .processes import *
from .trainer import *

#: All classes and functions imported above.
__all__ = sorted(
    n for n, x in globals().items() if getattr(x, "__module__", "").startswith(__name__)
)


def __dir__() -> list[str]:
    return list(__all__)
