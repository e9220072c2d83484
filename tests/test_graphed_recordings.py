"""Which recordings a loss keeps: settings, addresses, shapes and modes that make a new one."""

import contextlib
import copy
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rankgrad
from rankgrad import graphs
from rankgrad.detection import RegionLoss

from replays import batch, replay_on_the_cpu, replayed, taken


@pytest.fixture
def replays_on_the_cpu(monkeypatch):
    replay_on_the_cpu(monkeypatch)


@pytest.fixture
def made(replays_on_the_cpu, monkeypatch):
    """All recordings that were made."""
    found = []

    class Noted(graphs._Recording):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(graphs, "_Recording", Noted)
    return found


def test_old_recordings_make_room(replays_on_the_cpu):
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    for rows in range(4, 4 + 2 * graphs.MOST_RECORDINGS):
        for step in range(graphs.CALLS_BEFORE + 1):
            embeddings, labels = batch(rows, step, "cpu")
            loss(embeddings, labels).backward()
    assert len(loss._recordings) == graphs.MOST_RECORDINGS
    assert replayed(loss)
    assert not copy.deepcopy(loss)._recordings


def test_on_the_cpu_nothing_is_recorded():
    loss = rankgrad.graphed(rankgrad.RecallLoss(memory=2))
    for step in range(6):
        embeddings, labels = batch(12, step, "cpu")
        loss(embeddings, labels).backward()
    assert not loss._recordings


def test_what_makes_a_new_recording(made):
    """A graph has the settings and the addresses it was recorded with: other ones need another."""
    loss = rankgrad.graphed(rankgrad.RecallLoss(memory=1))

    def kinds():
        loss(*batch(12, 0, "cpu"))
        return len(made)

    kinds()  # the memory gets its form
    before = kinds()
    assert kinds() == before
    loss.loss.lam = 7.0
    assert kinds() == before + 1
    loss.loss.lam = np.float32(9.0)
    assert kinds() == before + 2
    loss.loss.lam = np.float32(8.0)
    assert kinds() == before + 3
    loss.loss.train(False)
    assert kinds() == before + 4
    loss.loss.train(True)
    state = {name: value.clone() for name, value in loss.loss.state_dict().items()}
    loss.reset()
    loss.loss.load_state_dict(state)  # the same memory in another place
    assert kinds() == before + 5
    loss.loss.weight = lambda counts: counts.double()  # no setting that could be compared, but not the name before
    assert kinds() == before + 6
    loss.loss.memory = rankgrad.EmbeddingMemory(3)
    kinds()
    assert kinds() == before + 8  # empty, then with a form
    loss.loss = rankgrad.RecallLoss(lam=50.0)
    assert kinds() == before + 9
    loss(*batch(13, 0, "cpu"))
    assert len(made) == before + 10
    loss.loss.register_buffer("more", torch.zeros(1))
    assert kinds() == before + 11


def test_a_setting_that_was_the_classes_own(replays_on_the_cpu):
    class Scaled(rankgrad.RecallLoss):
        factor = 1.0

        def forward(self, *inputs):
            return self.factor * super().forward(*inputs)

    loss = rankgrad.graphed(Scaled())
    values = [loss(*batch(12, 0, "cpu")).item() for _ in range(6)]
    loss.loss.factor = 3.0
    values += [loss(*batch(12, 0, "cpu")).item() for _ in range(6)]
    assert values == pytest.approx([values[0]] * 6 + [3 * values[0]] * 6)
    assert replayed(loss)


def test_a_name_instead_of_a_function_and_back(replays_on_the_cpu):
    loss = rankgrad.graphed(rankgrad.RecallLoss(weight="log"))
    found = []
    for weight in ("log", lambda counts: 7 * counts.double(), "log"):
        loss.loss.weight = weight
        found.append([loss(*batch(12, 0, "cpu")).item() for _ in range(6)])
    assert found[0] == found[2] != found[1]
    assert len(loss._recordings) == 2


def test_parameters_that_are_exchanged_or_frozen(replays_on_the_cpu):
    """Gradients go to the parameter that is there, under the same address too."""
    loss = rankgrad.graphed(rankgrad.ProxyRankingLoss(8, 16))

    def trained():
        for _ in range(6):
            loss.zero_grad()
            loss(*batch(12, 0, "cpu")).backward()
        return loss.loss.proxies.grad

    loss.loss.proxies.requires_grad_(False)
    assert trained() is None
    loss.loss.proxies.requires_grad_(True)
    before = trained().clone()
    loss.loss.proxies = torch.nn.Parameter(loss.loss.proxies.data)
    torch.testing.assert_close(trained(), before)
    loss.loss.proxies.requires_grad_(False)
    assert trained() is None
    loss.loss.proxies.requires_grad_(True)
    torch.testing.assert_close(trained(), before)


def test_parameters_in_another_place_make_a_new_recording(made):
    loss = rankgrad.graphed(rankgrad.ProxyRankingLoss(8, 16))
    for _ in range(2):
        loss(*batch(12, 0, "cpu"))
    assert len(made) == 1
    loss.loss.proxies.data = loss.loss.proxies.data.clone()  # as .to(...) does
    loss(*batch(12, 0, "cpu"))
    assert len(made) == 2
    twin = copy.deepcopy(loss)  # looks at its own loss
    for lam in (1.0, 2.0):
        twin.loss.lam = lam
        twin(*batch(12, 0, "cpu"))
    assert len(twin._recordings) == 2 and len(made) == 4


def test_settings_and_memory_far_below_are_seen(made):
    loss = rankgrad.graphed(RegionLoss(memory=1))

    def kinds():
        loss(torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1]))
        return len(made)

    kinds()  # the memory gets its form
    before = kinds()
    loss.loss.ranking.lam = 3.0
    assert kinds() == before + 1
    loss.loss.ranking.memory = rankgrad.ScoreMemory(2)
    kinds()
    assert kinds() == before + 3  # empty, then with a form


def test_a_tensor_of_another_form_in_the_same_place(replays_on_the_cpu):
    loss = rankgrad.graphed(rankgrad.RecallLoss(weight=torch.linspace(1.0, 0.1, 11)))
    for _ in range(6):
        loss(*batch(12, 0, "cpu"))
    loss.loss.weight.data = loss.loss.weight.data[:2]  # the same object, the same address
    torch.testing.assert_close(loss(*batch(12, 0, "cpu")), loss.loss(*batch(12, 0, "cpu")))


def test_inputs_that_may_change_are_refused(replays_on_the_cpu):
    class Own(torch.nn.Module):
        def forward(self, embeddings, factors):
            return sum(factors) * embeddings.sum()

    with pytest.raises(
        TypeError, match=r"inputs: expected tensors and values that cannot change, received Tensor, list"
    ):
        rankgrad.graphed(Own())(batch(12, 0, "cpu")[0], [1, 2])


def test_modes_make_a_new_recording(made):
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    loss(*batch(12, 0, "cpu"))
    torch.set_autocast_enabled("cuda", True)  # torch.autocast does nothing for a GPU that is not there
    try:
        loss(*batch(12, 0, "cpu"))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert len(made) == 2
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    try:
        loss(*batch(12, 0, "cpu"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(made) == 3
    embeddings, labels = batch(12, 0, "cpu")
    loss(embeddings, labels, items=None)
    loss(embeddings, labels=labels, items=None)
    assert len(made) == 5
    loss(embeddings, labels=labels, items=None)
    assert len(made) == 5


def test_recorded_under_hooks_of_saved_tensors(made):
    """The loss makes its gradient at once, so nothing of it is kept, moved or computed again."""
    loss, plain = rankgrad.graphed(rankgrad.RecallLoss()), rankgrad.RecallLoss()
    packed, forwards = [], []
    net = torch.nn.Linear(16, 16)
    net.register_forward_hook(lambda *given: forwards.append(1))
    for step in range(8):
        embeddings, labels = batch(12, step, "cpu")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            value = loss(embeddings, labels)
        torch.testing.assert_close(value, plain(embeddings, labels))
        checkpoint(lambda x, y=labels: loss(net(x), y), embeddings, use_reentrant=False).backward()
    assert made[0].replay is not None
    assert len(forwards) == 2 * 8  # of the network, once more in backward
    assert len(packed) == 8  # the gradient itself


@pytest.mark.gpu
def test_anomaly_mode_is_not_recorded():
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    for step in range(8):
        with torch.autograd.detect_anomaly(check_nan=True):
            loss(*batch(12, step, "cuda")).backward()
    assert not loss._recordings


def test_recorded_on_the_device_of_the_inputs(monkeypatch):
    """Whichever is the current one; torch's own stream for recording is of the device that came first."""
    entered = []

    @contextlib.contextmanager
    def noted(*given, **named):
        entered.append((given, named))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(torch.cuda, "graph", noted)
    graphs._stream.cache_clear()
    graphs._Recording(rankgrad.RecallLoss(), batch(12, 0, "cpu"), ()).record()
    graphs._stream.cache_clear()
    assert entered[0] == ((torch.device("cpu"),), {})
    assert entered[1][1]["stream"] == "a stream of cpu"


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_precision_by_its_new_name(made):
    """Where it was set by the new name, torch raises at a look by the old one."""
    before = torch.backends.cuda.matmul.fp32_precision
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    try:
        for precision in ("ieee", "tf32", "ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            loss(*batch(12, 0, "cpu"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [one.calls for one in made] == [2, 2]


def test_recordings_of_what_is_gone_go_too(replays_on_the_cpu):
    """A memory that was reset is not kept alive."""
    loss = rankgrad.graphed(rankgrad.RecallLoss(memory=2))
    rings = []
    for _ in range(4):
        loss.reset()
        for step in range(6):
            loss(*batch(12, step, "cpu")).backward()
        rings.append(weakref.ref(loss.loss.memory.embeddings))
    gc.collect()
    assert [ring() is not None for ring in rings] == [False] * 3 + [True]


def test_a_copy_made_in_inference_mode_is_recorded_anew(made):
    plain = rankgrad.RecallLoss(memory=2)
    plain(*batch(12, 0, "cpu"))
    with torch.inference_mode():
        recorded = rankgrad.graphed(copy.deepcopy(plain))
    for step in range(8):
        one, other = (taken(loss, *batch(12, step, "cpu")) for loss in (plain, recorded))
        torch.testing.assert_close(one, other)
    assert [one.calls for one in made] == [1, 7]  # the memory's own tensors took the place of those of the copy
