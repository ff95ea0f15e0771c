"""The names that scripts may rely on."""

from __future__ import annotations

from importlib.metadata import version
from types import FunctionType, ModuleType

import pytest

import fusestep

MODULES = ["data", "fp8", "models", "nn", "optim"]
FUNCTIONS = ["convert", "doctor", "explain"]
LATER = {
    "TrainStep": "fusestep.graph.train_step",
    "linear_cross_entropy": "fusestep.ops.linear_cross_entropy",
    "refresh": "fusestep.fp8.copies",
}


def test_all_is_sorted_and_whole() -> None:
    assert fusestep.__all__ == sorted(fusestep.__all__)
    shims = {"install_shims", "uninstall_shims"}
    assert set(fusestep.__all__) == {*MODULES, *FUNCTIONS, *shims, *LATER, "__version__"}
    assert dir(fusestep) == fusestep.__all__


@pytest.mark.parametrize("name", MODULES)
def test_parts_are_reached_as_attributes(name: str) -> None:
    part = getattr(fusestep, name)
    assert isinstance(part, ModuleType)
    assert part.__name__ == f"fusestep.{name}"


def test_others_are_reached_as_attributes() -> None:
    assert {name: getattr(fusestep, name).__module__ for name in LATER} == LATER


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_their_name_beside_their_module(name: str) -> None:
    __import__(f"fusestep.{name}")
    function = getattr(fusestep, name)
    assert isinstance(function, FunctionType)
    assert function.__doc__


def test_version_is_the_installed_one() -> None:
    assert fusestep.__version__ == version("fusestep")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fusestep' has no attribute 'fp9'"):
        _ = fusestep.fp9


def test_the_names_of_each_part() -> None:
    wanted = {
        "optim": {
            *("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"),
            *("accumulate_in_fp32", "clip_grad_norm_"),
        },
        "nn": {
            *("FusedLayerNorm", "FusedRMSNorm", "LayerNorm", "RMSNorm", "functional"),
            *("Embedding", "Linear", "LayerNormLinear", "LayerNormMLP", "LinearCrossEntropy"),
            *("DotProductAttention", "MultiheadAttention", "TransformerLayer"),
        },
        "models": {"GPT", "GPTConfig", "PRESETS", "generate"},
        "data": {"TextFiles", "TokenFile", "arithmetic_sequences", "open_source"},
    }
    for part, names in wanted.items():
        module = getattr(fusestep, part)
        assert names <= set(module.__all__), part
        assert all(hasattr(module, name) for name in names), part
