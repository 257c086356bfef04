from __future__ import annotations

import pytest
import torch
from torch import nn

import gaussnewton as gn

X, Y = torch.randn(5, 3), torch.randint(2, (5,))


def parts() -> tuple[nn.Sequential, nn.CrossEntropyLoss]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.CrossEntropyLoss()


def test_records_the_last_call() -> None:
    model, criterion = parts()
    with gn.Tape(model, criterion) as tape:
        criterion(model(X[:2]), Y[:2])
        loss = criterion(model(X), Y)
    assert tape.record.data == 5
    assert tape.record.loss is loss
    assert [call.name for call in tape.record.calls] == ["0", "2"]
    blocks = gn.KFRA()(tape.record)
    again = gn.curvature(model, criterion, (X, Y), method="kfra")
    for name in again:
        torch.testing.assert_close(blocks[name].G, again[name].G)


def test_loss_can_still_be_differentiated() -> None:
    model, criterion = parts()
    with gn.Tape(model, criterion) as tape:
        loss = criterion(model(X), Y)
    gn.KFLR()(tape.record)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_criterion_called_outside_the_record() -> None:
    model, criterion = parts()
    with gn.Tape(model, criterion) as tape:
        outputs = model(X)
    criterion(outputs, Y)
    with pytest.raises(gn.errors.RecordError, match="outside the record"):
        _ = tape.record


def test_model_called_outside_the_record() -> None:
    model, criterion = parts()
    outputs = model(X)
    with gn.Tape(model, criterion), pytest.raises(gn.errors.RecordError, match="do not come from"):
        criterion(outputs, Y)
    with gn.Tape(model, criterion), pytest.raises(gn.errors.RecordError, match="detached"):
        criterion(model(X).detach(), Y)


def test_another_criterion_does_not_count() -> None:
    model, criterion = parts()
    with gn.Tape(model, criterion) as tape:
        nn.CrossEntropyLoss()(model(X), Y)
    with pytest.raises(gn.errors.RecordError, match="this very criterion object"):
        _ = tape.record


def test_silent_without_gradients() -> None:
    model, criterion = parts()
    with gn.Tape(model, criterion) as tape:
        loss = criterion(model(X), Y)
        with torch.no_grad():
            criterion(model(X[:1]), Y[:1])
    assert tape.record.loss is loss


def test_leaves_no_hooks_also_on_error() -> None:
    model, criterion = parts()
    with pytest.raises(ZeroDivisionError), gn.Tape(model, criterion):
        _ = 1 / 0
    for module in (*model.modules(), criterion):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_hook_of_the_user_that_changes_the_output_lies_behind_the_layer() -> None:
    model, criterion = parts()
    model[0].register_forward_hook(lambda _module, _args, output: output * 3)
    model, x = model.double(), X.double()
    kflr = gn.curvature(model, criterion, (x, Y))
    blocks = gn.exact.gauss_newton_blocks(model, criterion, (x, Y))
    bias = blocks["0"][-4:, -4:]  # Σ_n 𝒢_n, as the bias sees it
    torch.testing.assert_close(kflr["0"].G, bias)
