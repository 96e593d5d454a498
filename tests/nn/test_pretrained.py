"""Networks in folders: what is written is made again, and everything else is refused."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn.pretrained import Pretrained

pytest.importorskip("safetensors", reason="safetensors is not installed")


class Own(Pretrained):
    """A network of a user: simple arguments, and one that is not."""

    def __init__(self, width: int, *sizes: int, names: tuple[str, ...] = (), activation: Any = None, **more: Any) -> None:
        super().__init__()
        self.names, self.more = names, more
        self.layer = wp.EquilibriumLayer(wp.nn.DenseCell(2, width, activation=activation), **more)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


NETWORKS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: wp.GaussianDEQ(4, 8, weight_variance=0.05, generator=draw(0), rtol=1e-9),
    "smooth": lambda: wp.GaussianDEQ(4, 8, activation=wp.nn.Softplus(centred=True), dtype=torch.float64),
    "skip": lambda: wp.SkipDEQ(4, 8, gamma=0.1, device="cpu"),
    "implicit_only": lambda: wp.ImplicitOnlyDEQ(4, 8, init="half_normal"),
    "implicit_only, Gaussian": lambda: wp.ImplicitOnlyDEQ(4, 8, gamma0=0.3),
    "monotone": lambda: wp.MonotoneDEQ(4, 8, margin=0.3),
    "opteq": lambda: wp.OptEq(4, 9, alpha=0.5, activation=wp.nn.LeakyReLU(0.1)),
    "deep_opteq": lambda: wp.DeepOptEq(4, (6, 8)),
    "residual": lambda: wp.nn.ResidualDEQ(1, 8, 10, groups=2, max_steps=30),
    "transformer": lambda: wp.nn.TransformerDEQ(10, 8, 2, length=4, max_steps=50),
    "nodes": lambda: wp.tasks.NodeClassifier(3, 8, 2),
    "own": lambda: Own(3, names=("a", "b"), activation=wp.nn.Tanh(), rtol=1e-5),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_saved_is_made_again(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]()
    assert network.save_pretrained(tmp_path / "folder", card={"accuracy": 0.5}) == tmp_path / "folder" / "config.json"
    again = type(network).from_pretrained(tmp_path / "folder")
    assert not again.training and again.card["accuracy"] == 0.5 and again.card["not_stored"] == []
    assert again.state_dict().keys() == network.state_dict().keys()
    for key, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[key], value) and again.state_dict()[key].dtype == value.dtype
    layer, other = (next(m for m in model.modules() if isinstance(m, wp.EquilibriumLayer)) for model in (network, again))
    assert (layer.rtol, layer.max_steps, layer.on_failure) == (other.rtol, other.max_steps, other.on_failure)
    if name in ("smooth", "own"):
        assert getattr(again, "activation", again).__repr__() == getattr(network, "activation", again).__repr__()


def test_predictions_are_the_same(tmp_path: Path) -> None:
    model = NETWORKS["gaussian"]().eval()
    x = torch.randn(5, 4, generator=draw(1))
    with torch.no_grad():
        model.W.mul_(0.5)  # what is stored are the present parameters, not the drawn ones
        expected = model(x)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(wp.GaussianDEQ.from_pretrained(tmp_path)(x), expected)


def test_the_files_have_the_form_of_the_hub(tmp_path: Path) -> None:
    import safetensors

    NETWORKS["smooth"]().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == config["library_name"] == "wellposed"
    assert config["architectures"] == ["GaussianDEQ"] and config["torch_dtype"] == "float64"
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == {"W", "U", "a"}


def test_a_network_of_another_default_dtype(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        NETWORKS["skip"]().save_pretrained(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert wp.SkipDEQ.from_pretrained(tmp_path).A.dtype == torch.float64
    half = NETWORKS["skip"]().to(torch.float64)
    half.v.data = half.v.data.float()
    with pytest.raises(wp.InvalidArgument, match="this one has float32, float64"):
        half.save_pretrained(tmp_path)


def test_arguments_that_cannot_be_stored_are_asked_for(tmp_path: Path) -> None:
    wp.GaussianDEQ(4, 8, solver=wp.Anderson(memory=3)).save_pretrained(tmp_path)
    with pytest.raises(wp.InvalidArgument, match=r"does not have solver; give them to GaussianDEQ.from_pretrained"):
        wp.GaussianDEQ.from_pretrained(tmp_path)
    assert wp.GaussianDEQ.from_pretrained(tmp_path, solver=wp.Anderson(memory=3)).layer.solver == wp.Anderson(memory=3)
    assert wp.GaussianDEQ.from_pretrained(tmp_path, solver=None, rtol=1e-3).layer.rtol == 1e-3


def test_signatures_and_copies_are_as_before(tmp_path: Path) -> None:
    import inspect

    assert list(inspect.signature(wp.GaussianDEQ).parameters)[:3] == ["in_features", "width", "weight_variance"]
    model = NETWORKS["gaussian"]()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.save_pretrained(tmp_path)
        assert torch.equal(wp.GaussianDEQ.from_pretrained(tmp_path).W, model.W)
    with pytest.raises(TypeError, match="wdith"):
        wp.GaussianDEQ(4, 8, wdith=3)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"architectures": ["SkipDEQ"]}, r"is of .'SkipDEQ'.; expected .'GaussianDEQ'."),
        ({"arguments": {"in_features": 4, "width": 10**9}}, "bytes of tensors; those of this network take"),
        ({"arguments": {"in_features": 4, "width": 9}}, "bytes of tensors|another architecture"),
        ({"arguments": {"in_features": 4, "width": -8}}, "does not fit GaussianDEQ: .*width"),
        ({"arguments": {"in_features": 4, "width": 8, "harm": 1}}, "does not fit GaussianDEQ: .*no option 'harm'"),
        ({"arguments": {"in_features": 4, "width": {"class": "os.system"}}}, "not a number, a text, a dtype or an activation"),
        ({"arguments": {"in_features": 4, "width": 8, "dtype": {"dtype": "os"}}}, "unknown dtype: 'os'"),
        (
            {"arguments": {"in_features": 4, "width": 8, "activation": {"activation": "dataclass", "arguments": {}}}},
            "not a number, a text, a dtype or an activation",
        ),
        (
            {"arguments": {"in_features": 4, "width": 8, "activation": {"activation": "Tanh", "arguments": {"x": 1}}}},
            "activation that cannot be made",
        ),
        ({"torch_dtype": "load"}, "unknown dtype"),
        ({"sha256": "0" * 64}, "size or checksum"),
    ],
)
def test_a_changed_configuration_is_refused(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    NETWORKS["gaussian"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(wp.CheckpointRefused, match=says):
        wp.GaussianDEQ.from_pretrained(tmp_path)


def test_a_folder_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(wp.CheckpointRefused, match=r"has no config.json; write one with save_pretrained"):
        wp.GaussianDEQ.from_pretrained(tmp_path)
    with pytest.raises(wp.InvalidType, match="must be a path; got int"):
        wp.GaussianDEQ.from_pretrained(3)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))  # a pickle is never looked at
    with pytest.raises(wp.CheckpointRefused, match="has no config.json"):
        wp.GaussianDEQ.from_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(wp.MissingPackage, match=r"no folder 'owner/name'.*needs huggingface_hub; install it with"):
        wp.GaussianDEQ.from_pretrained("owner/name")


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/mine", "~/models/mine", "a/b/c", "models/", "owner/ name"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(wp.CheckpointRefused, match=r"There is no folder .*; give the one that save_pretrained wrote\."):
        wp.GaussianDEQ.from_pretrained(name)


def test_what_the_hub_raises_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class RepositoryNotFoundError(OSError):
        pass

    def snapshot_download(*_: object, **__: object) -> str:
        raise RepositoryNotFoundError("401 Client Error.\n\nRepository Not Found for url: ...\nPlease make sure")

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    says = r"There is no folder 'models/mine', and nothing of that name came .* \(RepositoryNotFoundError\)\. Check the path"
    with pytest.raises(wp.CheckpointRefused, match=says) as caught:
        wp.GaussianDEQ.from_pretrained("models/mine")
    assert "\n" not in str(caught.value)


def test_a_name_on_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: the hub itself cannot be reached by a test."""
    model = NETWORKS["gaussian"]()
    model.save_pretrained(tmp_path)
    calls: list[Any] = []

    class Api:
        def create_repo(self, repo_id: str, exist_ok: bool) -> None:
            calls.append((repo_id, exist_ok))

        def upload_folder(self, repo_id: str, folder_path: str) -> str:
            calls.append(sorted(path.name for path in Path(folder_path).iterdir()))
            return f"https://example.org/{repo_id}"

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download, hub.HfApi = snapshot_download, Api
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert torch.equal(wp.GaussianDEQ.from_pretrained("owner/name").W, model.W)
    assert calls.pop() == ("owner/name", ["config.json", "model.safetensors"])
    assert model.push_to_hub("owner/name") == "https://example.org/owner/name"
    assert calls == [("owner/name", True), ["config.json", "model.safetensors"]]


def test_the_mixin_of_the_hub_can_be_added(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    class Both(nn.Module, hub.PyTorchModelHubMixin):  # type: ignore[name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = wp.EquilibriumLayer(wp.nn.DenseCell(2, width))

    model = Both(3)
    model.save_pretrained(tmp_path)
    again = Both.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"not_stored": 5}, "not_stored must be a list of names; got 5"),
        ({"not_stored": None}, "not_stored must be a list of names; got None"),
        ({"not_stored": [["a"]]}, r"not_stored must be a list of names; got \[\['a'\]\]"),
        ({"torch_dtype": "int64"}, "torch_dtype must be a floating point dtype; got torch.int64"),
        ({"device": "cuda"}, "has the argument 'device', which is never stored"),
        ({"generator": 1}, "has the argument 'generator', which is never stored"),
        ({"dtype": {"dtype": "int64"}}, "does not fit NodeClassifier: "),
        ({"rtol": 1e30, "max_steps": 1, "on_failure": "ignore"}, r"states rtol=1e\+30, expected below 1. Give rtol="),
        ({"rtol": 1}, "states rtol=1, expected below 1"),
    ],
)
def test_values_of_a_stranger_get_one_sentence(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    NETWORKS["nodes"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name, value in entries.items():
        (config if name in config else config["arguments"])[name] = value
    path.write_text(json.dumps(config))
    with pytest.raises(wp.CheckpointRefused, match=says):
        wp.tasks.NodeClassifier.from_pretrained(tmp_path)


def test_a_caller_may_give_a_loose_tolerance(tmp_path: Path) -> None:
    Own(3, rtol=2.0, atol=3.0).save_pretrained(tmp_path)
    with pytest.raises(wp.CheckpointRefused, match="states atol=3"):
        Own.from_pretrained(tmp_path, rtol=2.0)
    assert Own.from_pretrained(tmp_path, rtol=2.0, atol=3.0).layer.rtol == 2.0
