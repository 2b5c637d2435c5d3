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

from .batches import PairBatch, PairCollator, TokenBatches, pad_sequences
from .checkpoint import (
    CheckpointError,
    random_state,
    read_checkpoint,
    set_random_state,
    write_checkpoint,
)
from .loss import NextTokenLoss, label_smoothing_loss
from .optimizer import adamw, clip_gradients, linear_schedule, paper_schedule, parameter_groups
from .processes import checkpoint_activations, parallelise, process_group
from .trainer import History, Trainer, evaluate

__all__ = [
    "CheckpointError",
    "History",
    "NextTokenLoss",
    "PairBatch",
    "PairCollator",
    "TokenBatches",
    "Trainer",
    "adamw",
    "checkpoint_activations",
    "clip_gradients",
    "evaluate",
    "label_smoothing_loss",
    "linear_schedule",
    "pad_sequences",
    "paper_schedule",
    "parallelise",
    "parameter_groups",
    "process_group",
    "random_state",
    "read_checkpoint",
    "set_random_state",
    "write_checkpoint",
]
