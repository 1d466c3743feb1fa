"""`RunConfig`: how a model is trained, as far as it is not part of the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from monolith.config import Config, NonNegative, Positive
from monolith.nn.clip import ClipType

__all__ = ["RunConfig"]

_Count = Annotated[int, Field(ge=0)]


class RunConfig(Config):
    """How to run a model; every field is also a key of a configuration file and of `--set` on the command line.

    Example:
        >>> RunConfig(model_dir="runs/ctr", clip_norm=10.0).log_step_count_steps
        100
        >>> RunConfig(model_dirs="runs/ctr")
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunConfig.model_dirs: unknown field; did you mean 'model_dir'?
    """

    model_dir: str | None = None
    """Where the state is kept: a run continues from what it finds there and saves when it ends. None keeps nothing."""
    warm_start_from: str | None = None
    """The model_dir of another run of the same model: a run that finds nothing in its own model_dir starts with that run's
    weights and rows. The global step, the dense optimizer and the place in the data begin anew."""
    resume_data: bool = True
    """Continue in the data where the saved run stopped; False when the next run is given other data."""
    clip_norm: Positive | None = 1000.0
    """Largest joint norm of all gradients, dense and sparse together, or what `clip_type` says; None does not clip."""
    clip_type: ClipType = "global_norm"
    """What `clip_norm` limits, see `monolith.nn.clip_grads_`."""
    sparse_clip_norm: Positive | None = None
    """A limit of the sparse gradients' own."""
    dense_weight_decay: NonNegative = 0.0
    """Added to the gradient of each dense parameter after clipping, times the parameter."""
    embedding_prefetch_capacity: _Count = 0
    """Batches read ahead by a background thread; 0 reads in the step loop."""
    enable_embedding_postpush: bool = False
    """Apply sparse gradients while the next step computes: faster, and each lookup misses the step before."""
    event_time: str | None = None
    """Column of event times, seconds since 1970; the newest of a batch becomes the time of the rows it updates."""
    log_step_count_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between two lines of progress."""
    save_summary_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between two TensorBoard points; they are written only with a model_dir."""
    stop_on_nan: bool = True
    """Raise `DivergedError` for a loss or gradient that is NaN or infinite, before it reaches any weight."""
    seed: int | None = None
    """For torch's generators at the start of a run; None leaves them alone."""
    export_dir_base: str = "exported_models"
    """Folder of exports, inside model_dir unless it is absolute."""
