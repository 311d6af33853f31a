# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's config keys: each is done, said to be without effect, or refused; none is passed over."""

from __future__ import annotations

import json
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
import offload.deepspeed as deepspeed
from offload.deepspeed_config import Batch, Maker, make_optimizer, translate
from offload.deepspeed_config.keys import SECTIONS, TOP

from ..acceptance.models import stack
from ..acceptance.runs import assert_same_bits, refused

PLAIN: dict[str, Any] = {"stage": 0, "parameters": "device", "optimizer_states": "device", "max_grad_norm": 1.0}
"""What a config that says nothing asks for; clipping since DeepSpeed 0.19.8."""


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def at(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 8}, {}),
        (zero(2), {"stage": 2}),
        ({"zero_optimization": True}, {"stage": 1}),
        (zero(2, offload_optimizer={"device": "cpu"}), {"stage": 2, "optimizer_states": "cpu"}),
        (zero(2, cpu_offload=True), {"stage": 2, "optimizer_states": "cpu"}),
        (zero(3, cpu_offload_params=True), {"stage": 3, "parameters": "cpu"}),
        (zero(2, offload_param={"device": "cpu"}), {"stage": 2}),
        (zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none"}), {"stage": 3}),
        (
            zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
            {"stage": 3, "parameters": "cpu", "optimizer_states": "nvme", "nvme": "/n"},
        ),
        (
            zero(
                3,
                offload_param={"device": "nvme", "nvme_path": "/n"},
                offload_optimizer={"device": "nvme", "nvme_path": "/n"},
            ),
            {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme", "nvme": "/n"},
        ),
        (
            zero(
                3,
                offload_param={"device": "nvme", "nvme_path": "/a"},
                offload_optimizer={"device": "nvme", "nvme_path": "/b"},
            ),
            {"stage": 3, "parameters": "nvme", "optimizer_states": "nvme", "nvme": ["/b", "/a"]},
        ),
        (
            zero(3, offload_optimizer={"device": "nvme"}) | {"nvme": "/own", "cpu_memory": "1GiB"},
            {"stage": 3, "optimizer_states": "nvme", "nvme": "/own", "cpu_memory": 2**30},
        ),
        ({"bf16": {"enabled": True}}, {"dtype": "bf16", "loss_scale": "skip"}),
        ({"bfloat16": {"enabled": True}}, {"dtype": "bf16", "loss_scale": "skip"}),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"dtype": "bf16"}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {}),
        ({"fp16": {"enabled": True}}, {"dtype": "fp16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2, "loss_scale_window": 1000}}, {"dtype": "fp16"}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"dtype": "fp16", "loss_scale": 128.0}),
        (  # what is said of the dynamic scale is not read
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": -1}},
            {"dtype": "fp16", "loss_scale": 128.0},
        ),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
        ({"gradient_clipping": 0.0}, {"max_grad_norm": None}),
        ({"train_batch_size": 8, "max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
        ({"bf16": {"enabled": True}, "state_format": "split", "prefetch": 2}, None),
    ],
)
def test_what_is_translated(given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    if expected is None:
        expected = {"dtype": "bf16", "loss_scale": "skip", "state_format": "split", "prefetch": 2}
    assert translate(given, 1).config == offload.Config(**(PLAIN | expected))


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ((24, 4, 3), 2, Batch(24, 4, 3)),
        ((24, 4, None), 2, Batch(24, 4, 3)),
        ((24, None, 3), 2, Batch(24, 4, 3)),
        ((None, 4, 3), 2, Batch(24, 4, 3)),
        ((24, None, None), 2, Batch(24, 12, 1)),
        ((None, 4, None), 2, Batch(8, 4, 1)),
        ((None, None, 3), 2, Batch(None, None, 3)),
        (("auto", 4, 3), 2, Batch(24, 4, 3)),
        ((24, 4, "auto"), 2, Batch(24, 4, 3)),
        (("auto", "auto", 3), 2, Batch(None, None, 3)),
    ],
)
def test_batch_sizes(given: tuple[Any, ...], ranks: int, expected: Batch) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert translate(dict(zip(keys, given, strict=True)), ranks).batch == expected


def test_auto_is_what_accelerate_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = dict.fromkeys(("gradient_clipping", "gradient_accumulation_steps", "steps_per_print"), "auto")
    given |= {"fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": "auto"}, "train_batch_size": 4}
    given["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    given["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    }
    said = translate(given, 1)
    assert (said.config.max_grad_norm, said.config.dtype, said.batch.accumulation) == (1.0, None, 1)
    assert said.optimizer == Maker("AdamW", {"lr": 1e-3, "weight_decay": 0.0})
    assert said.scheduler == Maker("WarmupLR", {"warmup_min_lr": 0.0, "warmup_num_steps": 1})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert translate(given, 1).config.dtype == "bf16"


def test_fp16s_scale_by_initialize_itself() -> None:
    model = stack()
    with offload.initialize(model, torch.optim.SGD(model.parameters()), {"fp16": {"enabled": True, "hysteresis": 2}}) as engine:
        assert engine.loss_scale == 2**16


def test_no_key_of_a_section_that_is_off_counts() -> None:
    off = {"enabled": False, "loss_scale": "what", "hysteresis": 9, "fp16_master_weights_and_grads": True}
    assert translate({"fp16": off, "bf16": {"enabled": False, "bf16_optimizer_states": True}}, 1).config.dtype is None


def test_values_that_are_enumerations_or_infinite() -> None:
    class Device(str, Enum):
        cpu = "cpu"

    said = translate(zero(2, offload_optimizer={"device": Device.cpu}) | {"steps_per_print": float("inf")}, 1)
    assert (said.config.optimizer_states, said.steps_per_print) == ("cpu", None)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_that_tunes_is_named_in_one_warning(name: str) -> None:
    section = SECTIONS[name]
    paths = [f"{name}.{key}" if name else key for key in section.without_effect]
    values: dict[str, Any] = dict.fromkeys(section.without_effect, "auto")
    if name in ("fp16", "bf16", "torch_autocast"):
        values["enabled"] = True  # no key of a section that is off counts
    whole = at(name, values) if name else values
    if name.startswith("zero_optimization."):
        whole["zero_optimization"]["stage"] = 3
    translated = translate(whole, 1)
    assert list(translated.without_effect) == paths
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        translated.warn(1)
    assert len(caught) == bool(paths)
    assert all(path in str(caught[0].message) for path in paths)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, section in SECTIONS.items() for key in section.refused])
def test_every_refused_key_says_what_to_do(name: str, key: str) -> None:
    refusal, path = SECTIONS[name].refused[key], f"{name}.{key}" if name else key
    on = {name: {"enabled": True}} if name in ("fp16", "bf16") else {}
    for harmless in (*refusal.harmless, "auto", {"enabled": False}):
        translate(at(path, harmless), 1)
    for asking in ({"enabled": True}, 77):
        with refused(offload.ConfigError, path, refusal.instead):
            translate({name: on[name] | {key: asking}} if on else at(path, asking), 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_batchsize": 4}, ["train_batchsize", "'train_batch_size'"]),
        ({"train_batch_size": 4, "cpu_memry": 1}, ["cpu_memry", "'cpu_memory'"]),
        (zero(2, overlap_com=True), ["zero_optimization.overlap_com ", "'overlap_comm'"]),
        (zero(3, offload_param={"devize": "cpu"}), ["zero_optimization.offload_param.devize", "'device'"]),
        (zero(3, offload_param={"device": "gpu"}), ["offload_param.device='gpu'", "'none', 'cpu' or 'nvme'"]),
        (zero(3, offload_param="cpu"), ["zero_optimization.offload_param='cpu'", "an object"]),
        (zero(3, offload_param={"device": "nvme"}), ["offload_param.nvme_path"]),
        (zero(4), ["zero_optimization.stage=4"]),
        (zero(2) | {"stage": 3}, ["stage is set twice"]),
        ({"bf16": {"enabled": True}, "dtype": "bf16"}, ["dtype is set twice"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["contradict"]),
        ({"bf16": {"enabled": 1}}, ["bf16.enabled=1", "true nor false"]),
        ({"gradient_clipping": -1}, ["gradient_clipping=-1"]),
        ({"train_batch_size": 0}, ["train_batch_size=0", "1, 2"]),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4}, ["train_batch_size=9", "gradient_accumulation_steps=2"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            ["total_num_steps='auto'", "Accelerate"],
        ),
        ({"optimizer": {"type": "AdamW", "prams": {}}}, ["optimizer.prams", "'params'"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, ["fp16.initial_scale_power=12", "loss_scale"]),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ["fp16.loss_scale_window=0"]),
        ({"fp16": {"enabled": True, "loss_scale_window": float("inf")}}, ["fp16.loss_scale_window=inf", "whole number"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, ["fp16.min_loss_scale=0", "above 0"]),
    ],
)
def test_what_is_wrong_says_which_key(given: dict[str, Any], said: list[str]) -> None:
    with refused(offload.ConfigError, *said):
        offload.initialize(stack(), None, given)


def test_the_docs_name_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    for name, section in SECTIONS.items():
        missing = [key for key in section.known if f"`{key}`" not in page]
        assert not missing, f"{name or 'top level'}: {missing}"


@pytest.mark.parametrize(
    ("kind", "params", "expected_class", "expected"),
    [  # the defaults of the optimizers that DeepSpeed 0.19 makes
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("adamw", {"lr": 0.1, "betas": [0.8, 0.9]}, torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.3}, torch.optim.Adam, {"weight_decay": 0.3}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("Lion", {}, offload.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], expected_class: type, expected: dict[str, Any]) -> None:
    made = make_optimizer(Maker(kind, params), stack().parameters())
    assert type(made) is expected_class
    assert {name: made.param_groups[0][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("Lamb", {}, ["optimizer.type='Lamb'", "norms of the whole tensor", "Adagrad, Lion, SGD"]),
        ("Muon", {}, ["optimizer.type='Muon'", "whole matrices", "Adagrad, Lion, SGD"]),
        ("OneBitAdam", {}, ["optimizer.type='OneBitAdam'", "'Adam'"]),
        ("AdamW", {"amsgrad": True}, ["optimizer.params.amsgrad=True"]),
        ("AdamW", {"bias_correction": False}, ["optimizer.params.bias_correction=False"]),
        ("AdamW", {"max_grad_norm": 1.0}, ["gradient_clipping"]),
        ("AdamW", {"lr": "1e-3"}, ["optimizer.params.lr='1e-3'"]),
        ("AdamW", {"learning_rate": 1e-3}, ["learning_rate"]),
    ],
)
def test_optimizers_that_are_refused(kind: str, params: dict[str, Any], said: list[str]) -> None:
    with refused(offload.ConfigError, *said):
        make_optimizer(Maker(kind, params), stack().parameters())


def _train(config: Any, optimizer: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = stack(width=8, blocks=2)
    made = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0) if optimizer else None
    with offload.initialize(model, made, config) as engine:
        for step in range(4):
            engine.backward(model(torch.randn(3, 8, generator=torch.Generator().manual_seed(step))).square().mean())
            engine.step()
            engine.zero_grad()
        return engine.state_dict()


def test_initialize_takes_them_from_a_mapping_or_a_file(tmp_path: Path) -> None:
    expected = _train(offload.Config(parameters="cpu", optimizer_states="cpu", max_grad_norm=0.1), optimizer=True)
    given = zero(3, offload_param={"device": "nvme", "nvme_path": str(tmp_path)}, overlap_comm=True, sub_group_size=1e9)
    given["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True}
    given |= {"gradient_clipping": 0.1, "train_batch_size": 3, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    with pytest.warns(UserWarning, match=r"sub_group_size, .*pin_memory: without effect") as caught:
        assert_same_bits(_train(given, optimizer=False), expected)
    assert caught[0].filename == __file__
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    with pytest.warns(UserWarning, match="without effect"):
        assert_same_bits(_train(path, optimizer=False), expected)
    given["optimizer"]["params"]["lr"] = 77.0  # as in DeepSpeed, an optimizer that is passed is the one
    with pytest.warns(UserWarning, match="steps_per_print, optimizer: without effect"):
        assert_same_bits(_train(given | {"steps_per_print": 5}, optimizer=True), expected)


def test_what_deepspeeds_engine_does_is_not_left_undone() -> None:
    with refused(offload.ConfigError, "gradient_accumulation_steps=4", "offload.deepspeed.initialize"):
        offload.initialize(stack(), None, {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4})
    with refused(offload.ConfigError, "scheduler", "offload.deepspeed.initialize"):
        offload.initialize(stack(), None, {"scheduler": {"type": "WarmupLR", "params": {}}})


def test_own_keys_are_own_keys_still() -> None:
    with refused(offload.ConfigError, "'prefech'", "'prefetch'"):
        offload.initialize(stack(), None, {"prefech": 1})
    assert not set(SECTIONS[TOP].known) & set(vars(offload.Config()))


def test_the_zero_section_as_deepspeed_shows_it() -> None:
    from offload.deepspeed.zero_config import DeepSpeedZeroConfig, get_zero_config

    section = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3, "cpu_offload": True}}
    ).zero_config
    assert section.stage == 3 and section.overlap_comm and section.offload_param is None and section.sub_group_size == 10**9
    assert section.offload_optimizer.device == "cpu" and not section.offload_optimizer.pipeline
    older = {"stage3_gather_fp16_weights_on_model_save": True, "stage3_prefetch_bucket_size": 7, "cpu_offload_param": True}
    section = DeepSpeedZeroConfig(**older)
    assert section.gather_16bit_weights_on_model_save and section.prefetch_bucket_size == 7 and not section.overlap_comm
    assert section.offload_param.device == "cpu" and section.leaf_module.names == []
    assert get_zero_config({"zero_optimization": True}).stage == 1
    with refused(offload.ConfigError, "zero_optimization.satge", "'stage'"):
        DeepSpeedZeroConfig(satge=1)
    with refused(offload.ConfigError, "ratio=1.5"):
        DeepSpeedZeroConfig(offload_optimizer={"ratio": 1.5})
    with refused(offload.UsageError, "Stage 3"):
        DeepSpeedZeroConfig(stage=2, offload_optimizer={"ratio": 0.5})


def test_zenflow_without_keys_asks_for_it() -> None:
    with refused(offload.ConfigError, "zenflow={}", "never stale"):
        translate({"train_batch_size": 1, "zero_optimization": {"stage": 2, "zenflow": {}}}, 1)


def test_16_bit_masters_and_moments_are_the_formats_of_as_many_bytes() -> None:
    masters, moments = {"bf16_master_weights_and_grads": True}, {"bf16_optimizer_states": True}
    for keys, expected in (({}, "fp32"), (masters, "split"), (masters | moments, "bf16")):
        assert translate({"bf16": {"enabled": True, **keys}}, 1).config.state_format == expected
    with refused(offload.ConfigError, "bf16_optimizer_states needs bf16.bf16_master_weights_and_grads"):
        translate({"bf16": {"enabled": True, **moments}}, 1)


def test_what_zeropp_rounds_on_the_wire_travels_as_it_is() -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    said = translate({"zero_optimization": {"stage": 3, **keys}}, 1)
    assert set(said.without_effect) == {f"zero_optimization.{key}" for key in keys}


_CPU, _HALF = (
    {"device": "cpu", "pin_memory": True},
    {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32},
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_FACTORY = {
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "T", "csv_monitor": {"enabled": False}},
}
_THREE = {
    **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto"},
    **{"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 0},
    **{"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
}


@pytest.mark.parametrize(
    ("given", "placed"),
    [
        (_FACTORY | {"zero_optimization": {"stage": 0, "round_robin_gradients": True}}, (0, "device", "device")),
        (_FACTORY | {"zero_optimization": {"stage": 2, "offload_optimizer": _CPU}}, (2, "device", "cpu")),
        (_FACTORY | {"zero_optimization": _THREE}, (3, "device", "device")),
        (_FACTORY | {"zero_optimization": _THREE | {"offload_optimizer": _CPU, "offload_param": _CPU}}, (3, "cpu", "cpu")),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}, "compile": {"disable": False, "backend": "inductor"}},
            (1, "device", "device"),
        ),
        (
            {"zero_force_ds_cpu_optimizer": False, "zero_optimization": _THREE | {"offload_param": _CPU, "sub_group_size": 0}},
            (3, "cpu", "device"),
        ),
    ],
)
def test_what_llama_factory_and_axolotl_ship_is_taken_as_it_is(given: dict[str, Any], placed: tuple[Any, ...]) -> None:
    """In shape: what their example configs hold, with the words that Accelerate fills in."""
    rest = {"fp16": _HALF, "bf16": {"enabled": "auto"}, "zero_allow_untested_optimizer": True, "wall_clock_breakdown": False}
    config = translate(dict.fromkeys(_SIZES, "auto") | rest | given, 1).config
    assert (config.stage, config.parameters, config.optimizer_states) == placed
