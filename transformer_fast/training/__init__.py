"""Training that can be copied: losses, schedules, batches, checkpoints and a loop.

    sampler = training.TokenBatches(lengths, max_tokens=4096)
    loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=training.PairCollator(0, 1, 2))
    optimizer = training.adamw(model)
    trainer = training.Trainer(
        model, optimizer, training.NextTokenLoss(pad_token=0),
        schedule=training.paper_schedule(optimizer, d_model=512), checkpoint="run.pt",
    )
    trainer.resume()
    trainer.fit(loader, epochs=10, validation=other_loader)

The parts work by themselves too, in a loop of your own. ``torchrun`` needs two lines more,
`process_group` and `parallelise`.
"""

from .batches import *
from .checkpoint import *
from .loss import *
from .optimizer import *
from .processes import *
from .trainer import *

#: All classes and functions above.
__all__ = sorted(
    n for n, x in globals().items() if getattr(x, "__module__", "").startswith(__name__)
)
