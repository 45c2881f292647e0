"""The checks for users take linear maps of every kind: linop's, SciPy's, PyLops's, torch's,
functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import linop
import linop.testing as lt
from linop import Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, BackendError
from linop.testing import pair
from support.spmd import check_programs
from support.spmd.check_programs import COMPLEX


@pytest.mark.slow
def test_operators_and_plans() -> None:
    X = TensorSpace((5, 4), Partition((2, 2)))
    op = linop.halo_exchange(X, 3, padding=1)
    for backend in ("reference", "threads"):
        chosen = linop.backends.get(backend)
        assert all(check_programs.checked(chosen, op))
        assert all(check_programs.checked(chosen, op.compile(chosen)))
    assert lt.check_exact(op).tolerance == 0
    lt.assert_unitary(linop.repartition(X, Partition((4, 1))))
    lt.assert_inverse(2 * linop.identity(X), linop.identity(X) / 2)
    lt.assert_self_adjoint(op.H @ op)
    report = lt.check_unitary(op)
    assert not report
    assert "x@" in report.details


def test_scipy() -> None:
    A = scipy.sparse.csr_array(COMPLEX)
    product = scipy.sparse.linalg.aslinearoperator(A) @ scipy.sparse.linalg.aslinearoperator(A.T)
    for op in (A, A.tocoo(), COMPLEX, product, product.H, 2j * product):
        assert all(check_programs.checked(linop.backends.get("reference"), op))
    lt.assert_equal(linop.local_operators.matrix(COMPLEX), A)
    lt.assert_adjoint(A, adjoint=COMPLEX.conj().T)
    wrong = scipy.sparse.linalg.LinearOperator(
        (2, 3), matvec=A.__matmul__, rmatvec=A.T.__matmul__, dtype=complex
    )
    assert "j, the conjugate transpose of the adjoint has " in lt.check_adjoint(wrong).details
    narrow = scipy.sparse.linalg.LinearOperator(
        (3, 3), matvec=np.float32, rmatvec=np.copy, dtype=float
    )
    assert "returned dtype float32 for y (worker 0)" in lt.check_adjoint(narrow).details
    only = scipy.sparse.linalg.LinearOperator((3, 3), matvec=np.copy, dtype=float)
    with pytest.raises(NotImplementedError) as missing:
        lt.check_adjoint(only)
    assert missing.value.__notes__ == [
        "raised by the adjoint function of <3x3 _CustomLinearOperator with dtype=float64>"
    ]


def test_pylops() -> None:
    pylops = pytest.importorskip("pylops")
    for op in (
        pylops.FirstDerivative((4, 3), axis=0),
        pylops.Identity(4),  # gives its argument back, as it may
        pylops.signalprocessing.FFT(7),
    ):
        lt.assert_adjoint(op)
        lt.assert_exact(op)
        lt.assert_linear(op)
    wrong = pylops.FirstDerivative((4, 3), axis=0) - 0 * pylops.Identity(12)
    wrong = pylops.FunctionOperator(wrong.matvec, wrong.matvec, 12, 12)
    wrong.dims = wrong.dimsd = (4, 3)
    report = lt.check_adjoint(wrong)
    assert report.worst is not None and report.worst.source is not None
    assert len(report.worst.source.index) == 2


def test_functions_of_tensors() -> None:
    torch = pytest.importorskip("torch")

    class Double(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return torch.cat([2 * g[:1], 3 * g[1:2], 2 * g[2:]])

    report = lt.check_adjoint(lt.torch_function(Double, (4, 2)))
    assert report.operator == "<8x8 Double>"
    assert "to y[1, " in report.details
    assert "F has 2, the conjugate transpose of the adjoint has 3" in report.details
    for function in (torch.fft.fft, torch.fft.rfft, torch.diff, torch.transpose_copy):
        if function is torch.transpose_copy:
            op = lt.torch_function(lambda x: x.T, (2, 3), "complex64")
        else:
            op = lt.torch_function(function, 6, float if function is torch.fft.rfft else complex)
        assert lt.check_adjoint(op)
        assert lt.check_linear(op)
    with pytest.raises(ArgumentError, match="square gives tuple, one tensor expected"):
        lt.torch_function(lambda x: (x, x), 3, name="square")


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(ArgumentError, match="check_linear: expected an operator, given 3"):
        lt.check_linear(3)
    with pytest.raises(ArgumentError, match=r"see linop\.testing\.pair"):
        lt.check_adjoint(np.diff)
    with pytest.raises(ArgumentError, match="pair: forward is a function; given 3"):
        pair(3, np.diff, 3, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="<3x3 copy> has no adjoint to check"):
        lt.check_adjoint(pair(np.copy, None, 3, 3))


def test_a_region_that_nobody_holds_is_refused() -> None:
    """It would pass: nobody would look at it."""
    far = Space(Region("x", 3, 2))
    words = r"regions on the workers \[2\]; backend 'threads' has workers 0 to 1"
    with pytest.raises(BackendError, match=words):
        lt.check_linear(pair(np.copy, None, far, far), linop.backends.get("threads", workers=2))


def test_an_exception_of_a_function_has_a_note() -> None:
    def forward(x: np.ndarray) -> np.ndarray:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted") as raised:
        lt.check_linear(pair(forward, None, 3, 3))
    assert raised.value.__notes__ == ["raised by the forward function of <3x3 forward>"]
