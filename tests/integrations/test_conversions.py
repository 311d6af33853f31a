# SPDX-License-Identifier: Apache-2.0
"""`weights=` of a folder that holds other tensors than its model: transformers renames, stacks, joins and cuts on loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import offload
from offload.checkpoint.export.offline import export_checkpoint
from offload.checkpoint.export.weights import Exporter
from offload.model import weights
from offload.model.conversions import conversions, outlined_model, reversions
from offload.model.weights import INDEX_FILE, SINGLE_FILE, open_weights
from tests.warm import WarmProcess

from ..acceptance.conftest import nvme, opened, settled
from ..acceptance.models import ON_CPU, ON_NVME, ON_NVME_IN_PLACE, adamw, byte_batches
from ..acceptance.runs import assert_same_bits, refused

rules = pytest.importorskip("transformers.conversion_mapping", reason="transformers 4 converts nothing")
loading = pytest.importorskip("transformers.core_model_loading", reason="transformers 4 converts nothing")

__all__ = ["nvme", "opened", "settled"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WIDTHS: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "renamed, stacked and joined": ("Mixtral ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "stacked and joined": ("Qwen3Moe ForCausalLM", {**GROUPED, "num_experts": 12, "moe_intermediate_size": 16, "head_dim": 8}),
    "behind a dense layer": (
        "DeepseekV3 ForCausalLM",
        {**WIDTHS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "in every other layer": ("Jamba ForCausalLM", {**GROUPED, "num_experts": 4, "use_mamba_kernels": False}),
    "with biases": ("Phimoe ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "renamed": ("GraniteMoe ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "a renamed head": ("GPTNeoX ForCausalLM", WIDTHS),
    "a renamed encoder": ("ViT Model", {**VISION, "intermediate_size": 48}),
    "cut apart": ("HrmText ForCausalLM", GROUPED),
    "cut apart, without a head": ("NomicBert Model", WIDTHS),
    "renamed and cut apart": ("Dinov2 Model", {**VISION, "use_swiglu_ffn": True}),
}  # fmt: skip
MIXTRAL, CUT = "renamed, stacked and joined", "cut apart"
TRANSPOSED: dict[str, Any] = {
    "text_config": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "num_experts_per_tok": 2},
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
                      "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}  # fmt: skip


def built(family: str) -> Any:
    """A model with values of its own in everything, also in what is initialised with ones and zeros."""
    name, sizes = FAMILIES[family]
    prefix, kind = name.split()
    model = getattr(transformers, prefix + kind)(getattr(transformers, f"{prefix}Config")(**sizes))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def transposed() -> Any:
    return transformers.Qwen3VLMoeForConditionalGeneration(transformers.Qwen3VLMoeConfig(**TRANSPOSED))


def deferred(family: str) -> Any:
    with offload.deferred_init():
        return built(family)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What `save_pretrained` writes of a family, in files so small that experts of one layer lie in several."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            torch.manual_seed(7)
            made[family] = tmp_path_factory.mktemp("saved")
            built(family).save_pretrained(made[family], max_shard_size="20KB")
        return made[family]

    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def loaded(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """By transformers."""
    model, report = type(built(family)).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return dict(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_what_from_pretrained_loads(
    opened: Any, folders: Callable[[str], Path], nvme: Path, tmp_path: Path, family: str
) -> None:
    folder = folders(family)
    expected = loaded(family, folder)
    assert tensors_in(folder).keys() - expected.keys()  # else there is nothing to convert
    with offload.initialize(deferred(family), config=ON_NVME_IN_PLACE.fields(nvme), weights=folder) as engine:
        assert_same_bits(engine.state_dict(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_are_what_save_pretrained_writes(
    opened: Any, folders: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = folders(family)
    model = deferred(family)
    engine = opened(model, adamw(model), ON_NVME, weights=folder)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.export(tmp_path / "exported", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "as in memory", save_original_format=False)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "later", None, 20_000)
    for name in ("exported", "saved", "later"):
        assert len(list((tmp_path / name).glob("model-*.safetensors"))) > 1
        assert_same_bits(tensors_in(tmp_path / name), tensors_in(folder))
        index = json.loads((tmp_path / name / INDEX_FILE).read_text())
        assert index["weight_map"].keys() == tensors_in(folder).keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_in(folder).values())
        assert_same_bits(loaded(family, tmp_path / name), engine.state_dict())
    kept = tensors_in(tmp_path / "as in memory")
    assert_same_bits(kept, {name: value for name, value in engine.state_dict().items() if name in kept})
    assert kept.keys() - tensors_in(folder).keys()
    assert_same_bits(loaded(family, tmp_path / "as in memory"), engine.state_dict())
    engine.close()
    for name in ("exported", "as in memory"):
        again = deferred(family)
        assert_same_bits(opened(again, adamw(again), ON_CPU, weights=tmp_path / name).state_dict(), loaded(family, folder))


def test_names_of_the_hub_with_a_prefix_that_the_model_has_no_more(nvme: Path, tmp_path: Path) -> None:
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**WIDTHS))
    model.config.save_pretrained(tmp_path)
    save_file({f"text_model.{name}": value for name, value in model.state_dict().items()}, tmp_path / SINGLE_FILE)
    with offload.deferred_init():
        lazy = transformers.CLIPTextModel(model.config)
    with offload.initialize(lazy, config=ON_CPU.fields(nvme), weights=tmp_path) as engine:
        assert_same_bits(engine.state_dict(), dict(transformers.CLIPTextModel.from_pretrained(tmp_path).state_dict()))
        assert_same_bits(engine.state_dict(), dict(model.state_dict()))


def test_a_prefix_that_from_pretrained_dropped_is_there_again_in_what_is_saved(opened: Any, tmp_path: Path) -> None:
    """As transformers has it; and only where it was: transformers 4 finds it in a folder, or finds nothing."""
    kind = transformers.CLIPTextModel
    model = kind(transformers.CLIPTextConfig(**WIDTHS))
    model.save_pretrained(tmp_path / "without")
    model.config.save_pretrained(tmp_path / "with")
    state = {f"text_model.{name}": value for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "with" / SINGLE_FILE, metadata={"format": "pt"})
    for name in ("with", "without"):
        kind.from_pretrained(tmp_path / name).save_pretrained(tmp_path / f"{name}, theirs")
        with offload.deferred_init():
            lazy = kind.from_pretrained(tmp_path / name)
        engine = opened(lazy, adamw(lazy), ON_CPU)
        engine.export(tmp_path / f"{name}, exported")
        lazy.save_pretrained(tmp_path / f"{name}, saved")
        for one in ("theirs", "exported", "saved"):
            assert_same_bits(tensors_in(tmp_path / f"{name}, {one}"), tensors_in(tmp_path / name))
        engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_in_another_dtype(opened: Any, nvme: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    built(MIXTRAL).to(dtype).save_pretrained(tmp_path)
    model = type(built(MIXTRAL)).from_pretrained(tmp_path, dtype=torch.float32)
    with offload.initialize(deferred(MIXTRAL), config=ON_NVME.fields(nvme), weights=tmp_path) as engine:
        assert_same_bits(engine.state_dict(), dict(model.state_dict()))


def test_experts_that_are_transposed_are_so_under_adapters_too(nvme: Path, tmp_path: Path) -> None:
    """Whether they are is seen from the shape of the parameter, which adapters keep under another name."""
    model = transposed()
    model.config.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    experts = [name for name in state if ".experts." in name]
    save_file(
        {name: value.transpose(1, 2).contiguous() if name in experts else value for name, value in state.items()},
        tmp_path / SINGLE_FILE,
    )
    assert_same_bits(dict(type(model).from_pretrained(tmp_path).state_dict()), state)
    adapters = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with offload.deferred_init():
        adapted = get_peft_model(transposed(), adapters)
    with offload.initialize(adapted, config=ON_CPU.fields(nvme), weights=tmp_path) as engine:
        found = {name.removeprefix("base_model.model."): value for name, value in engine.state_dict().items()}
        assert any(".base_layer." in name for name in found)
        found = {name.replace(".base_layer", ""): value for name, value in found.items() if ".lora_" not in name}
        assert_same_bits(found, state)


def test_a_run_goes_as_one_on_the_model_that_from_pretrained_loads(
    opened: Any, folders: Callable[[str], Path], nvme: Path
) -> None:
    def losses(model: Any, folder: Path | None) -> list[float]:
        engine = opened(model.train(), torch.optim.AdamW(model.parameters(), lr=0.01), ON_NVME, weights=folder)
        found = []
        for tokens in byte_batches(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            engine.step()
            engine.zero_grad()
            found.append(loss.item())
        engine.close()
        return found

    expected = losses(type(built(MIXTRAL)).from_pretrained(folders(MIXTRAL)), None)
    assert losses(deferred(MIXTRAL), folders(MIXTRAL)) == expected


@pytest.mark.parametrize("family", [MIXTRAL, CUT])
def test_nothing_is_read_or_made_twice(
    folders: Callable[[str], Path], nvme: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    made: list[str] = []
    convert = weights._converted

    def counted(entry: Any) -> Any:
        made.extend(entry.conversion.names)
        return convert(entry)

    monkeypatch.setattr(weights, "_converted", counted)
    with offload.initialize(deferred(family), config=ON_NVME.fields(nvme), weights=folders(family)):
        pass
    found = conversions(deferred(family), tensors_in(folders(family)), "")
    assert found is not None and found.joint
    assert sorted(made) == sorted(name for one in found.joint for name in one.names)


def test_what_is_made_beside_what_was_asked_for_waits_once_and_in_its_own_memory(folders: Callable[[str], Path]) -> None:
    model, expected = deferred(CUT), loaded(CUT, folders(CUT))
    source = open_weights(folders(CUT)).converted_for(model)
    assert source.match(model) == {name: name for name in expected}
    for name in expected:
        value = source.load(name)
        assert value.untyped_storage().nbytes() == value.nbytes  # without what it was cut from
        value.zero_()
    assert not source._waiting
    for name in expected:
        assert torch.equal(source.load(name), expected[name])
        assert not source._waiting


def test_memory_is_that_of_one_tensor_of_the_model(tmp_path: Path) -> None:
    """Experts of 8 MiB, of which a tensor of the model has 32 MiB, in 6 layers."""
    expert = torch.zeros(1024, 2048)
    names = [f"model.layers.{layer}.mlp.experts.{index}.down_proj.weight" for layer in range(6) for index in range(4)]
    save_file({name: expert.clone() for name in names}, tmp_path / SINGLE_FILE)
    script = f"""
        import torch, transformers
        from offload.model.weights import open_weights
        from tests.acceptance.worker import resident_nbytes
        sizes = dict(vocab_size=8, hidden_size=1024, moe_intermediate_size=2048, num_experts=4, num_hidden_layers=6)
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, num_attention_heads=4))
        source = open_weights({str(tmp_path)!r}).converted_for(model)
        base = resident_nbytes("VmHWM")
        assert len(source.names()) == 6
        for name in source.names():
            assert source.load(name).shape == (4, 1024, 2048)
        print(resident_nbytes("VmHWM") - base)
    """
    done = WarmProcess.run(["-c", textwrap.dedent(script)], 240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 * 4 * expert.nbytes  # what is made, and the mapping from which it is


# ---- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: built(MIXTRAL), transposed], ids=["one by one", "transposed"])
def test_a_merged_export_is_what_save_pretrained_writes_of_the_merged_model(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = LoraConfig(target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)

    def adapted(base: Any) -> Any:
        torch.manual_seed(5)
        return get_peft_model(base, adapters)

    make().save_pretrained(tmp_path / "base")
    adapted(type(make()).from_pretrained(tmp_path / "base")).merge_and_unload().save_pretrained(tmp_path / "theirs")
    with offload.deferred_init():
        model = adapted(make())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = opened(model, torch.optim.AdamW(trained), ON_CPU, weights=tmp_path / "base")
    engine.export(tmp_path / "ours", merged=True)
    assert tensors_in(tmp_path / "ours").keys() == tensors_in(tmp_path / "base").keys()
    assert "names that it has in memory" not in caplog.text
    assert_same_bits(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


def test_experts_whose_elements_lie_in_another_order(opened: Any, tmp_path: Path) -> None:
    model = built(MIXTRAL)
    model.save_pretrained(tmp_path / "theirs")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2))
    opened(model, adamw(model), ON_CPU).export(tmp_path / "ours")
    assert_same_bits(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


def test_no_more_than_a_layer_waits_to_be_written(
    opened: Any, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    append = Exporter._append_made

    def watched(exporter: Exporter, joint: Any) -> None:
        waiting = {id(one): one.arriving.values for one in exporter._joint.values()}
        held.append({name for values in waiting.values() for name in values})
        append(exporter, joint)
        assert not joint.arriving.values

    monkeypatch.setattr(Exporter, "_append_made", watched)
    model = deferred(MIXTRAL)
    opened(model, adamw(model), ON_NVME, weights=folders(MIXTRAL)).export(tmp_path / "exported")
    assert len(held) == 4  # two tensors of experts in each of two layers
    assert all(len({name.split(".")[2] for name in names}) == 1 for names in held)


def test_rules_that_cannot_be_reversed_leave_the_names_in_memory(
    opened: Any,
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def irreversible(_: object) -> Any:
        raise NotImplementedError("there is no way back")

    monkeypatch.setattr(loading.MergeModulelist, "reverse_op", property(irreversible))
    model = deferred(MIXTRAL)
    engine = opened(model, adamw(model), ON_CPU, weights=folders(MIXTRAL))
    engine.export(tmp_path / "exported")
    assert_same_bits(tensors_in(tmp_path / "exported"), engine.state_dict())
    assert "MixtralForCausalLM is saved under the names that it has in memory: there is no way back" in caplog.text
    monkeypatch.undo()
    assert_same_bits(loaded(MIXTRAL, tmp_path / "exported"), loaded(MIXTRAL, folders(MIXTRAL)))


def test_versions_of_transformers_5_that_lack_the_newer_functions(
    opened: Any, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 5.16 there are no functions that rename or convert alone, until 5.3 no changes of prefixes, and in 5.0 a conversion
    gives its errors beside what it makes."""

    def rename(name: str, renamings: Any, converters: Any, prefix: Any = None, tensors: Any = None) -> tuple[str, str | None]:
        pattern = None
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        for rule in converters:
            if pattern is None:
                name, pattern = rule.rename_source_key(name)
        return name, pattern

    expected = tensors_in(folders(MIXTRAL))
    convert = loading.WeightConverter.convert
    monkeypatch.setattr(loading.WeightConverter, "convert", lambda *args, **given: (convert(*args, **given), {}))
    monkeypatch.setattr(loading, "rename_source_key", rename)
    for name in ("apply_renamings", "apply_converters", "PrefixChange"):
        monkeypatch.delattr(loading, name, raising=False)
    model = deferred(MIXTRAL)
    opened(model, adamw(model), ON_CPU, weights=folders(MIXTRAL)).export(tmp_path / "exported")
    model.save_pretrained(tmp_path / "saved")
    assert_same_bits(tensors_in(tmp_path / "exported"), expected)
    assert_same_bits(tensors_in(tmp_path / "saved"), expected)


def test_without_transformers_a_checkpoint_is_exported_under_the_names_in_memory(
    opened: Any, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = deferred(MIXTRAL)
    engine = opened(model, adamw(model), ON_CPU, weights=folders(MIXTRAL))
    engine.save_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "transformers.py").write_text("raise ImportError('not installed')\n")
    command = [sys.executable, "-m", "offload", "export", str(tmp_path / "checkpoint"), str(tmp_path / "exported")]
    path = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert_same_bits(tensors_in(tmp_path / "exported"), engine.state_dict())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("MixtralForCausalLM", {"auto_map": {"AutoModelForCausalLM": "own.Own"}}),
        ("MixtralForCausalLM", {"hidden_size": -1}),
        ("MixtralConfig", {}),
        ("pipeline", {}),
        ("", {}),
    ],
)
def test_a_class_that_is_not_the_librarys_or_cannot_be_built_has_no_outline(kind: str, changes: dict[str, Any]) -> None:
    config = built(MIXTRAL).config.to_dict()
    assert outlined_model("MixtralForCausalLM", json.dumps(config)) is not None
    assert outlined_model(kind, json.dumps(config | changes)) is None


# ---- what does not fit -----------------------------------------------------------------------------------------------


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """What is in the folder, as one file, changed."""
    state = tensors_in(folder)
    change(state)
    save_file(state, target / SINGLE_FILE)
    return target


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop(EXPERT), [repr(FUSED), "cannot be made of 7 tensors", "experts.0.w1.weight [48, 32]"]),
        (lambda state: state.update({EXPERT: torch.ones(47, 32)}), [repr(FUSED), "cannot be made of 8 tensors"]),
        (
            lambda state: [state.pop(EXPERT), state.pop(EXPERT.replace("w1", "w3"))],
            ["1 of another shape", f"{FUSED} (model: [4, 96, 32], file: [3, 96, 32])"],
        ),
        (lambda state: state.update({FUSED: torch.ones(4, 96, 32)}), ["holds", repr(FUSED), "experts.0.w1.weight"]),
        (
            lambda state: state.update({"model.layers.1.mlp.gate.weight": torch.ones(4, 32)}),
            ["holds both", "'model.layers.1.block_sparse_moe.gate.weight'", "'model.layers.1.mlp.gate.weight'"],
        ),
        (
            lambda state: state.update({EXPERT.replace("layers.1", "layers.2"): torch.ones(48, 32)}),
            ["1 unexpected: model.layers.2.block_sparse_moe.experts.2.w1.weight [48, 32]"],
        ),
        (
            lambda state: state.update({EXPERT: torch.ones(48, 32, dtype=torch.int32)}),
            [repr(FUSED), "torch.float32, torch.int32", "experts.0.w1.weight"],
        ),
    ],
    ids=["an expert is missing", "an expert is smaller", "an expert is wholly missing", "fused too", "renamed too",
         "a layer too many", "integers"],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(
    folders: Callable[[str], Path], nvme: Path, tmp_path: Path, change: Any, words: list[str]
) -> None:
    folder = changed(folders(MIXTRAL), tmp_path, change)
    model = deferred(MIXTRAL)
    with refused(offload.InitializerError, *words):
        offload.initialize(model, config=ON_CPU.fields(nvme), weights=folder)
    with offload.initialize(model, config=ON_CPU.fields(nvme), weights=folders(MIXTRAL)) as engine:
        assert_same_bits(engine.state_dict(), loaded(MIXTRAL, folders(MIXTRAL)))


def test_what_is_ignored_under_the_name_that_it_would_have(nvme: Path, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(folders(MIXTRAL), tmp_path, lambda state: state.update({"model.old.block_sparse_moe.x": torch.ones(1)}))
    model = deferred(MIXTRAL)
    with refused(offload.InitializerError, "1 unexpected: model.old.block_sparse_moe.x [1]"):
        offload.initialize(model, config=ON_CPU.fields(nvme), weights=folder)
    model._keys_to_ignore_on_load_unexpected = [r"old\.mlp\.x"]
    with offload.initialize(model, config=ON_CPU.fields(nvme), weights=folder) as engine:
        assert_same_bits(engine.state_dict(), loaded(MIXTRAL, folders(MIXTRAL)))


# ---- every family ----------------------------------------------------------------------------------------------------


def outlined(name: str) -> Any:
    """The class's own default model with at most two layers, on the meta device; None where there is none like that."""
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "config_class"):
        return None
    try:
        config = kind.config_class()
        for attribute in ("num_hidden_layers", "num_layers", "n_layer"):
            if isinstance(getattr(config, attribute, None), int):
                setattr(config, attribute, min(2, getattr(config, attribute)))
        with torch.device("meta"):
            return kind(config)
    except Exception:  # its configuration has no defaults, or they do not go with so few layers
        return None


def test_names_and_shapes_of_every_causal_model_that_is_converted() -> None:
    converted = 0
    for name in sorted({str(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}):
        model = outlined(name)
        if model is None or not rules.get_model_conversion_mapping(model, add_legacy=False):
            continue
        expected = {fqn: tensor.shape for fqn, tensor in model.state_dict().items()}
        reverted = loading.revert_weight_conversion(model, model.state_dict())
        for saved in (reverted, model.state_dict()):
            found = conversions(model, saved, name)
            assert found is not None and not found.unexpected, name
            shapes = {fqn: saved[given].shape for fqn, given in found.renamed.items()}
            for one in found.joint:
                shapes |= {fqn: made.shape for fqn, made in one.made_of({part: saved[part] for part in one.names}).items()}
            assert shapes == expected, name
            converted += saved.keys() != expected.keys()
        back = reversions(model, model.state_dict())
        assert back is not None
        shapes = {key: expected[fqn] for key, fqn in back.renamed.items()}
        for one in back.joint:
            shapes |= {key: made.shape for key, made in one.made_of(model.state_dict()).items()}
        assert shapes == {key: tensor.shape for key, tensor in reverted.items()}, name
    assert converted > 30
