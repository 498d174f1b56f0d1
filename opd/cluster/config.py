"""The section [cluster]: how many GPUs do what, and where slime lives. Strict, plain values.

It imports nothing heavy: `--dry-run` works on a laptop.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from opd.cluster.architecture import Architecture
from rollout_bridge.slime.carrier import CALIBRATION_BOUND

RAY_WORKER_PORTS = range(10002, 20000)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ActorLayout(_Section):
    """The GPUs that train, and how Megatron splits the model over them."""

    gpus: PositiveInt
    """GPUs of the trainer, counted over all nodes."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer; they must be in one node."""
    pipeline_parallel: PositiveInt = 1
    """Stages that the layers are split into."""
    context_parallel: PositiveInt = 1
    """GPUs that share one sequence."""
    expert_parallel: PositiveInt = 1
    """GPUs that share the experts of a mixture-of-experts model."""
    expert_tensor_parallel: PositiveInt = 1
    """GPUs that share each expert."""

    @property
    def model_parallel(self) -> int:
        """GPUs that share one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Copies of the model; only meaningful for a layout that was checked."""
        return self.gpus // self.model_parallel


class EngineGroup(_Section):
    """SGLang engines with the same weights, behind one router."""

    gpus: PositiveInt
    """GPUs of all engines of this group together."""
    gpus_per_engine: PositiveInt = 1
    """GPUs that one engine splits its weights over; they must be in one node."""
    mem_fraction: float = Field(default=0.8, gt=0, lt=1)
    """Share of each GPU's memory for weights and KV cache."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, e.g. `{chunked_prefill_size = 8192}`."""


class ModelEngines(EngineGroup):
    """Engines of another model than the policy's: of a judge, or of a further teacher."""

    model: str
    """Folder of its weights, in Hugging Face format."""


class RayConfig(_Section):
    """The Ray head that the launch starts on this node. It listens only on the ports that Ray needs
    between nodes; the dashboard, which can run anything, listens on loopback only.
    """

    head_ip: str | None = None
    """Address of this node for the others; required with several nodes."""
    port: int = Field(default=6379, ge=1, le=65535)
    """Port that the other nodes join at."""
    dashboard_port: int = Field(default=8265, ge=1, le=65535)
    """Port on loopback at which jobs are submitted."""
    agent_port: int = Field(default=52365, ge=1, le=65535)
    """Port of Ray's agent on each node; without it no job starts."""

    @model_validator(mode="after")
    def _ports_are_free_of_ray_workers(self) -> RayConfig:
        for key in ("port", "dashboard_port", "agent_port"):
            if getattr(self, key) in RAY_WORKER_PORTS:
                raise ValueError(
                    f"{key} {getattr(self, key)}: Ray's workers use the ports 10002 to 19999; "
                    "choose another"
                )
        return self


class ClusterConfig(_Section):
    """A slime job and the engines next to it."""

    nodes: PositiveInt = 1
    """Nodes of the job."""
    gpus_per_node: PositiveInt = 8
    """GPUs on each node that this job may use. All of them are used: a layout has to add up."""
    actor: ActorLayout
    """The GPUs that train."""
    policy: EngineGroup
    """The engines that serve agents; they get the new weights after each step."""
    frozen: EngineGroup
    """The engines with the start weights: teacher, and judge unless there is a separate one."""
    judge: ModelEngines | None = None
    """Engines for a separate judge. Unset: the frozen engines judge, or `judge.base_url`."""
    teachers: dict[str, ModelEngines] = Field(default_factory=dict)
    """Engines of further teachers, by name; `scoring.routes`, the header `X-Teacher` and
    `scoring.default_teacher` choose one.
    """
    architecture: Architecture | None = None
    """The values of the model's config.json, for a launch or a dry run without the folder."""
    model_flags: list[str] = Field(default_factory=list)
    """Megatron's architecture flags, for a family that cannot be derived from config.json."""
    megatron_checkpoint: str | None = None
    """The start weights in Megatron's format. Unset: slime reads the Hugging Face folder itself."""
    routing_replay: Literal["auto", "none", "R2", "R3"] = "auto"
    """For a mixture of experts: whether training uses the experts that the trainer chose before the
    step (R2), or those that the engine chose while it sampled (R3), which
    `engine_client.routed_experts_topk` records. auto: none for one step on a batch
    (`trainer.epochs_per_batch`), R2 for two or three, R3 for more.
    """
    calibration_bound: PositiveFloat = CALIBRATION_BOUND
    """Nats. When a job starts, its engines and its trainer score the same texts; a mean difference
    above this ends it. In bfloat16, two implementations differ by 0.01 to 0.05 on average.
    """
    recompute: bool = True
    """Recompute activations in the backward pass: less memory, a third more computation."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in the memory of the host."""
    save_interval: PositiveInt = 20
    """Steps between two checkpoints. A turn counts as trained once a checkpoint contains its step.
    A rollback goes back to one of them, so fewer steps lose less.
    """
    save_hf: bool = True
    """With each checkpoint, write the weights in Hugging Face format too."""

    router_policy: str = "manual"
    """How SGLang's router spreads requests. `manual` and, if the router has it,
    `consistent_hashing` keep a session on the engine that has its prefix.
    """
    python: str = "python3"
    """Python that has slime, Megatron-LM, SGLang, Ray and this project; the same on all nodes."""
    slime_root: str = "/root/slime"
    """slime's source tree; the same on all nodes. The default is that of slime's container."""
    megatron_root: str = "/root/Megatron-LM"
    """Megatron-LM's source tree; the same on all nodes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the job's processes, e.g. `{NCCL_SOCKET_IFNAME = "eth0"}`."""
    extra_flags: list[str] = Field(default_factory=list)
    """Further flags of slime's train_async.py, one list item for each word; checked like the
    others.
    """
    unknown_versions: Literal["refuse", "warn"] = "refuse"
    """What to do with versions of slime, Megatron-LM or SGLang that were never tried with this
    launch.
    """
    ray: RayConfig = RayConfig()
    """The Ray head."""
    frozen_base_port: int = Field(default=21000, ge=1024, le=60000)
    """First port of the engines of frozen, judge and teachers on a node; each engine takes 64 from
    there.
    """
    nodes_timeout_s: PositiveFloat = 1800.0
    """How long to wait for the other nodes."""
    engines_timeout_s: PositiveFloat = 3600.0
    """How long to wait for the engines after the job was submitted."""
    proxy_timeout_s: PositiveFloat = 300.0
    """How long to wait for the endpoint after the engines are up."""

    @field_validator("teachers")
    @classmethod
    def _teachers_have_names(cls, value: dict[str, ModelEngines]) -> dict[str, ModelEngines]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"teachers.{name}: a name has letters, digits, - and _ only")
        return value

    @model_validator(mode="after")
    def _several_nodes_have_addresses(self) -> ClusterConfig:
        if self.nodes > 1 and self.ray.head_ip is None:
            raise ValueError(
                f"ray.head_ip: {self.nodes} nodes must find this one: set the address at which "
                "they reach it"
            )
        if self.frozen_base_port in RAY_WORKER_PORTS:
            raise ValueError(
                f"frozen_base_port {self.frozen_base_port}: Ray's workers and the policy engines "
                "use the ports 10002 to 19999; choose one from 20000 up"
            )
        return self
