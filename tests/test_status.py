"""Status and its array: members one by one, masks together."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from wellposed import Status
from wellposed.status import StatusArray

CODES = [0, 1, 0, 3, 2]
MEMBERS = [Status.CONVERGED, Status.MAX_STEPS, Status.CONVERGED, Status.NOT_FINITE, Status.DIVERGED]


@pytest.fixture
def status() -> StatusArray:
    return StatusArray(torch.tensor(CODES))


def test_every_status_explains_itself() -> None:
    messages = [status.message for status in Status]
    assert all(messages) and len(set(messages)) == len(Status) == 4


def test_members(status: StatusArray) -> None:
    assert len(status) == 5 and status.shape == (5,)
    assert status[1] is Status.MAX_STEPS and status[-1] is Status.DIVERGED
    assert status[np.int64(3)] is Status.NOT_FINITE and status[torch.tensor(3)] is Status.NOT_FINITE
    assert list(status) == status.tolist() == MEMBERS
    assert all(isinstance(member, Status) for member in status)
    with pytest.raises(IndexError):
        status[5]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 4), MEMBERS[1:4]),
        (slice(None, None, 2), MEMBERS[::2]),
        (slice(0, 0), []),
        ([4, 0], [Status.DIVERGED, Status.CONVERGED]),
        (torch.tensor([3]), [Status.NOT_FINITE]),
        (torch.tensor([True, False, True, False, False]), [Status.CONVERGED] * 2),
    ],
    ids=str,
)
def test_parts(status: StatusArray, index: object, expected: list[Status]) -> None:
    part = status[index]
    assert isinstance(part, StatusArray) and part.tolist() == expected


def test_comparison_is_a_mask(status: StatusArray) -> None:
    assert (status == Status.CONVERGED).tolist() == [True, False, True, False, False]
    assert (status != Status.CONVERGED).tolist() == [False, True, False, True, True]
    assert (Status.CONVERGED == status).tolist() == [True, False, True, False, False]
    assert (status == status).all() and not (status != status).any()
    assert (status == torch.tensor(CODES)).all()


def test_comparison_with_something_else(status: StatusArray) -> None:
    assert (status == "CONVERGED") is False
    assert (status != "CONVERGED") is True


def test_contains(status: StatusArray) -> None:
    assert Status.DIVERGED in status and 3 in status
    assert Status.DIVERGED not in status[:3]
    assert "CONVERGED" not in status


def test_numpy(status: StatusArray) -> None:
    codes = np.asarray(status)
    assert codes.dtype == np.int64 and codes.tolist() == CODES
    codes[0] = 3  # a copy: the truth cannot be written over
    assert status[0] is Status.CONVERGED
    assert np.asarray(status, dtype=np.int8).dtype == np.int8
    assert np.array(status).tolist() == CODES


def test_is_no_key(status: StatusArray) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(status)


def test_copies(status: StatusArray) -> None:
    for other in (pickle.loads(pickle.dumps(status)), copy.deepcopy(status)):
        assert other.tolist() == MEMBERS and other.codes is not status.codes


def test_repr(status: StatusArray) -> None:
    assert repr(status) == "StatusArray(CONVERGED: 2, MAX_STEPS: 1, DIVERGED: 1, NOT_FINITE: 1)"
    assert repr(status[:0]) == "StatusArray()"
