# SPDX-License-Identifier: Apache-2.0
"""Every key that DeepSpeed 0.19 reads, in one of three classes.

    translated       decides what is computed or where it lies, and is done; its text says how
    without effect   tunes buffers, buckets, overlap, logs: results do not depend on it here, and nothing needs tuning
    refused          asks for other numbers, or for a feature that is not here; harmless values are accepted

Older names that configurations still carry are among them. The tables of docs/deepspeed.md are made of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOP = ""
ZERO = "zero_optimization"
OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer"
OFFLOAD_PARAM = "zero_optimization.offload_param"
LEAF_MODULE = "zero_optimization.leaf_module"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`instead`: what to do. Values in `harmless` ask for nothing; nor does a section whose "enabled" is false, nor, unless
    `empty_asks`, one without keys."""

    instead: str
    harmless: tuple[Any, ...] = (None, False)
    empty_asks: bool = False

    def is_harmless(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return not (value or self.empty_asks) or value.get("enabled", True) is False
        return any(value is one or (value == one and isinstance(value, bool) == isinstance(one, bool)) for one in self.harmless)


@dataclass(frozen=True, slots=True)
class Section:
    """`is_open`: keys that are not listed are without effect as long as no refused one asks for anything."""

    translated: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    is_open: bool = False

    @property
    def known(self) -> tuple[str, ...]:
        return (*self.translated, *self.without_effect, *self.refused)


_BATCH = "the missing ones follow from the others and the number of ranks; contradictions raise"
_DROP_INS = "of the drop-in; without effect elsewhere"
_SECTION = "see its keys"
_LEAVE_OUT = "leave it out"
_WHOLE_LAYERS = "every rank computes whole layers here: leave it out; parameters and states that do not fit go to cpu or nvme"
_PERSISTENCE = (
    "of the drop-in at stage 3: units of no larger parameters stay whole on every rank between steps, and may be read there; "
    "100,000 if missing"
)
_MODEL_PERSISTENCE = "how many elements those have in all at most"
_OWN_LOOP = "it belongs to the data or the loop: do it there, and leave it out"

SECTIONS: Mapping[str, Section] = {
    TOP: Section(
        translated={
            "train_batch_size": _BATCH,
            "train_micro_batch_size_per_gpu": _BATCH,
            "gradient_accumulation_steps": f"{_BATCH}; done by the drop-in, left to the loop by `offload.initialize`, which "
            "refuses a number above 1",
            "optimizer": "made where none is passed: Adam (AdamW unless `adam_w_mode` is false), AdamW, Adagrad, Lion, SGD, "
            "with DeepSpeed's defaults",
            "scheduler": "made and stepped by the drop-in; `offload.initialize` refuses it",
            "fp16": '`enabled`: `dtype` "fp16", and DeepSpeed\'s rule for the scale; `offload.initialize` has its own',
            "bf16": '`enabled`: `dtype` "bf16"',
            "bfloat16": "the older name of `bf16`",
            "gradient_clipping": "`max_grad_norm`; 0 is none; left out it is 1.0, as since DeepSpeed 0.19.8",
            "zero_optimization": "the section; `true` is stage 1",
            "steps_per_print": _DROP_INS,
            "dataloader_drop_last": _DROP_INS,
            "data_types": _SECTION,
            "checkpoint": _SECTION,
            "tensor_parallel": _SECTION,
            "compile": _SECTION,
            "activation_checkpointing": "as `deepspeed.checkpointing.configure`",
            "managed_gradient_accumulation": "false: every `step()` updates",
            "gradient_allreduce_op": '"mean"; below stage 3 also "sum": averages times the number of ranks',
            "zero_allow_untested_optimizer": "true: an optimizer without a kernel here is called on parts of parameters; "
            "refused where it needs them whole",
            "progressive_layer_drop": "the engine's forward tells the model, which leaves layers out; "
            "`offload.initialize` leaves it to the loop",
            "torch_autocast": "`torch.autocast` around the engine's forward; `offload.initialize` leaves it to the loop",
        },
        without_effect=(
            *("aio", "comet", "comms_config", "comms_logger", "monitor_config", "csv_monitor", "datastates"),
            "disable_allgather",
            *("disable_python_gc", "dump_state", "flops_profiler", "graph_harvesting", "log_level", "memory_breakdown"),
            *("seq_parallel_communication_data_type", "sparse_gradients", "tensorboard", "timers"),
            *("use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb"),
            *("zero_force_ds_cpu_optimizer", "data_parallel_size"),
            *("prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
        ),
        refused={
            "amp": Refusal('use "bf16" or "fp16"'),
            "autotuning": Refusal("placements and budgets are what there is to choose: ask `python -m offload plan`"),
            "compression_training": Refusal(_LEAVE_OUT),
            "curriculum_learning": Refusal(_OWN_LOOP),
            "data_efficiency": Refusal(_OWN_LOOP),
            "eigenvalue": Refusal(_LEAVE_OUT),
            "elasticity": Refusal("give the batch sizes; a checkpoint loads on any number of ranks"),
            "expert_parallel": Refusal(_WHOLE_LAYERS),
            "hybrid_engine": Refusal("model.generate() works between steps: leave it out"),
            "nebula": Refusal("engine.save_checkpoint(wait=False) saves beside training: leave it out"),
            "pipeline": Refusal(_WHOLE_LAYERS),
            "quantize_training": Refusal(_LEAVE_OUT),
            "sequence_parallel_size": Refusal(_WHOLE_LAYERS, (None, 1)),
            "sparse_attention": Refusal("it is a matter of the model: choose it there"),
            "weight_quantization": Refusal(_LEAVE_OUT),
        },
    ),
    ZERO: Section(
        translated={
            "stage": "`stage`; 0 if missing",
            "offload_optimizer": "`optimizer_states`",
            "offload_param": "`parameters`, at stage 3; below, parameters stay on the device",
            "cpu_offload": 'the older form of `offload_optimizer` on "cpu"',
            "cpu_offload_params": 'the older form of `offload_param` on "cpu"',
            "cpu_offload_param": 'the older form of `offload_param` on "cpu"',
            "ignore_unused_parameters": "false at stages 1 and 2: a step whose loss leaves a trained parameter out raises",
            "enable_sanity_checks": "of the drop-in: a write inside `GatheredParameters` without a `modifier_rank` raises",
            "leaf_module": "marks modules for `z3_leaf_module`; nothing else depends on it",
            "param_persistence_threshold": _PERSISTENCE,
            "stage3_param_persistence_threshold": _PERSISTENCE,
            "model_persistence_threshold": _MODEL_PERSISTENCE,
            "stage3_model_persistence_threshold": _MODEL_PERSISTENCE,
        },
        without_effect=(
            *("allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients"),
            *("cpu_offload_use_pin_memory", "elastic_checkpoint"),
            *("legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings"),
            *("max_live_parameters", "max_reuse_distance", "memory_efficient_linear"),
            *("module_granularity_threshold", "overlap_comm", "override_module_apply"),
            *("parameter_alignment", "pipeline_loading_checkpoint", "prefetch_bucket_size", "reduce_bucket_size"),
            *("reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory"),
            *("stage3_allgather_sequential", "allgather_sequential", "stage3_gather_16bit_weights_on_model_save"),
            *("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_module_granularity_threshold", "stage3_prefetch_bucket_size"),
            *("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "sub_group_size"),
            *("use_multi_rank_bucket_allreduce", "zero_hpz_partition_size"),
            # what travels is never rounded to fewer bits here
            *("zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights", "zeropp_loco_param"),
        ),
        refused={
            "mics_shard_size": Refusal("pass mesh= (replicate x shard) to offload.initialize", (None, -1)),
            "mics_hierarchical_params_gather": Refusal("pass mesh= (replicate x shard) to offload.initialize"),
            "zenflow": Refusal("updates are never stale here: leave it out", (None,), empty_asks=True),
        },
    ),
    OFFLOAD_OPTIMIZER: Section(
        translated={
            "device": '"none" is "device", "cpu", "nvme"',
            "nvme_path": "`nvme`; two different ones are striped",
            "ratio": "in stage 3 the states of 1 - ratio of the parameters, by whole units, lie and are updated on the device",
        },
        without_effect=(
            *("buffer_count", "cpuadam_cores_perc", "fast_init", "pin_memory", "pipeline", "pipeline_read"),
            *("pipeline_write", "super_offload"),
        ),
    ),
    OFFLOAD_PARAM: Section(
        translated={"device": '"none" is "device", "cpu", "nvme"', "nvme_path": "`nvme`; two different ones are striped"},
        without_effect=("buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    ),
    "fp16": Section(
        translated={
            "enabled": "of a section that is off no key counts",
            "loss_scale": "`loss_scale`; 0 is the dynamic one",
            **dict.fromkeys(
                ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
                "as there; `offload.initialize` refuses other values than DeepSpeed's defaults",
            ),
            "fp16_master_weights_and_grads": "masters stay fp32: that takes more memory, and rounds less",
        },
        without_effect=("auto_cast",),
    ),
    "bf16": Section(
        translated={
            "enabled": "of a section that is off no key counts",
            "check_grad_overflow": "true if missing: steps with non-finite gradients are left out, else they raise",
            "bf16_master_weights_and_grads": '`state_format` "split": an exact fp32 master, in the memory of a bf16 '
            "weight and a bf16 master",
            "bf16_optimizer_states": '`state_format` "bf16": moments in bf16, rounded stochastically; masters as above',
        },
        without_effect=("immediate_grad_update", "check_overflow"),
    ),
    "progressive_layer_drop": Section(
        translated={
            "enabled": "of a section that is off no key counts",
            "theta": "what the share of layers that is kept comes down to; 1.0",
            "gamma": "how fast, per step; 0.001",
        },
    ),
    "activation_checkpointing": Section(
        translated={
            "partition_activations": "nothing to partition over",
            "cpu_checkpointing": "what a checkpoint keeps lies in CPU memory",
            "contiguous_memory_optimization": "torch's matter; needs `number_checkpoints`",
            "number_checkpoints": "see `contiguous_memory_optimization`",
        },
        without_effect=("synchronize_checkpoint_boundary", "profile", "profile_activation_memory", "granularity"),
        is_open=True,
    ),
    "torch_autocast": Section(
        translated={"enabled": "whether", "dtype": "bfloat16, or float16 with torch.amp.GradScaler's rule for the loss scale"},
        without_effect=("lower_precision_safe_modules",),
    ),
    LEAF_MODULE: Section(translated=dict.fromkeys(("classes", "names", "name_suffixes"), "which modules")),
    "optimizer": Section(translated={"type": "which", "params": "its numbers"}, without_effect=("legacy_fusion", "torch_adam")),
    "scheduler": Section(translated={"type": "DeepSpeed's five, or one of torch.optim.lr_scheduler", "params": "its numbers"}),
    "data_types": Section(
        translated={
            "grad_accum_dtype": "what the gradients of several micro-batches are summed in: left out, as in DeepSpeed, what "
            'the model computes in, rounded at each; "fp32" rounds none, as `offload.initialize` always does. Another 16-bit '
            "one: fp32 from stage 1 on, refused at stage 0, as there",
            "param_dtype": "what `fp16` or `bf16` say already, or refused",
            "buffer_dtype": "the drop-in casts the model's buffers; `offload.initialize` leaves them",
        },
        without_effect=("keep_in_fp32_modules",),
    ),
    "checkpoint": Section(
        translated={
            "tag_validation": '"Fail" raises on all ranks where tags differ; "Warn" and "Ignore" take rank 0\'s',
            "load_universal": "`load_checkpoint` without a tag takes the one in `latest_universal`",
        },
        without_effect=("parallel_write", "use_node_local_storage", "checkpoint_serialization", "writer"),
    ),
    "tensor_parallel": Section(
        refused={"autotp_size": Refusal(_WHOLE_LAYERS, (None, 0, 1))},
        is_open=True,
    ),
    "compile": Section(
        refused={"deepcompile": Refusal("torch.compile the model's blocks: leave it out")},
        is_open=True,
    ),
}
