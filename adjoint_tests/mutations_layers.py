"""Faults on the top floors: torch's graph, layers, the state of models."""

from __future__ import annotations

from mutations import Fault

GRAPH = "test_autograd.py::test_on_threads"
DERIVATIVES = "test_autograd.py::test_derivatives_of_all_operators"
LINEAR = "test_layers.py::test_linear_on_threads"
CONV = "test_layers_sliding.py::test_convolutions_on_threads"
POOL = "test_layers_sliding.py::test_poolings_on_threads"
NORM = "test_layers_norm.py::test_norms_on_threads"
STATISTICS = "test_layers_norm.py::test_running_statistics_on_threads"
MASKS = "test_layers_dropout.py::test_masks_on_threads"
LOSSES = "test_layers_loss.py::test_losses_on_threads"
STATES = "test_state.py::test_states_are_exact_on_threads"
STOCK = "test_layers_stock.py::test_on_threads"
RESAMPLE = "test_layers_resample.py"

LAYERS = (
    # torch's graph
    Fault(
        "backward is forward",
        "the gradient is the operator's, and not its adjoint's, result",
        "backends/autograd.py",
        "adjoint: Bridge = ctx.bridge.adjoint",
        "adjoint: Bridge = ctx.bridge",
        (GRAPH,),
    ),
    Fault(
        "gradient conjugated",
        "the gradient goes through the conjugate of what is behind it",
        "backends/autograd.py",
        "*_through(adjoint, _opened(adjoint, where), gradients)",
        "*_through(adjoint, _opened(adjoint, where), [g.conj() for g in gradients])",
        (GRAPH,),
    ),
    Fault(
        "tangent dropped",
        "in forward mode the tangents of all but the first region are zero",
        "backends/autograd.py",
        "given = [z if t is None else t for t, z in",
        "given = [z if t is None or t is not tangents[3] else t for t, z in",
        (DERIVATIVES,),
    ),
    Fault(
        "dropped region",
        "of a worker's regions the last one gets the tensor of the first",
        "backends/bridge.py",
        "{r.name: self._array(k, tensors[k]) for k, r",
        "{r.name: self._array(k, tensors[k * (k + 1 < len(tensors))]) for k, r",
        (GRAPH,),
    ),
    Fault(
        "crossing passes unnoticed",
        "backward passes that come in another order on one worker are not told",
        "backends/bridge.py",
        "if call and (call != self.order.last or self._debug):",
        "if call and self._debug:",
        ("test_autograd.py::test_passes_that_cross_do_not_end_well",),
    ),
    # Layers
    Fault(
        "bias on every column",
        "the bias of a linear layer is held, and added, by all workers of a row of the grid",
        "layers/linear.py",
        "TensorSpace((out_features,), P_W[:, 0]), whole.bias",
        "TensorSpace((out_features,), P_W, axes=[0, COPIES]), whole.bias",
        (LINEAR,),
    ),
    Fault(
        "weights on a transposed grid",
        "the blocks of a linear layer's weight are held as if the grid were transposed",
        "layers/linear.py",
        "TensorSpace((out_features, in_features), P_W), whole.weight",
        "TensorSpace((out_features, in_features), P_W.T), whole.weight",
        (LINEAR,),
    ),
    Fault(
        "count of one block",
        "the mean of a batch is divided by the number of this worker's elements",
        "layers/moments.py",
        "self.count = prod(X.global_shape[d] for d in dims)",
        "shape = X.local_shape(layer.worker) if layer.worker in X.partition else X.global_shape\n"
        "        self.count = max(1, prod(shape[d] for d in dims))",
        (NORM,),
    ),
    Fault(
        "biased running variance",
        "the running variance is divided by the number of elements, not by one less",
        "layers/norm.py",
        "variance.flatten() * (count / (count - 1))",
        "variance.flatten()",
        (STATISTICS,),
    ),
    Fault(
        "mask by local index",
        "which elements are dropped depends on where they stand in their block",
        "layers/dropout.py",
        "torch.arange(part.start, part.stop)",
        "torch.arange(part.stop - part.start)",
        (MASKS,),
    ),
    Fault(
        "dropout not scaled back",
        "what is kept is divided by the probability to be dropped",
        "layers/dropout.py",
        "1 / (1 - self.p) if self.p < 1 else 0",
        "1 / self.p if self.p < 1 else 0",
        ("test_layers_dropout.py::test_what_is_kept_is_scaled_back",),
    ),
    Fault(
        "pool's pads in the wrong order",
        "torch is given the padding of the first dimension first",
        "layers/pool.py",
        "for pair in reversed(pads) for width in pair",
        "for pair in pads for width in pair",
        (POOL,),
    ),
    Fault(
        "average over what is not there",
        "an average counts what the ceiling mode adds beyond the padding",
        "layers/pool.py",
        "last = (first + k).clamp(max=n + p)",
        "last = first + k",
        (POOL,),
    ),
    Fault(
        "all groups on every worker",
        "a worker convolves its channels as if it had all groups",
        "layers/conv.py",
        "return max(1, (last - first) // each_out), inputs",
        "return self.groups, inputs",
        (CONV,),
    ),
    Fault(
        "kernels at the wrong stride",
        "a convolution's stride is 1 in the last dimension",
        "layers/conv.py",
        "stride, dilation = self.window.stride, self.window.dilation",
        "stride, dilation = (*self.window.stride[:-1], 1), self.window.dilation",
        (CONV,),
    ),
    Fault(
        "rows by remainder",
        "an embedding finds its rows as if all blocks of the table were of one length",
        "layers/embedding.py",
        "self._rows(x[here] - rows.start, rows)",
        "self._rows(x[here] % (rows.stop - rows.start), rows)",
        ("test_layers_embedding.py::test_embeddings_on_threads",),
    ),
    Fault(
        "exponentials on scales of their own",
        "the exponentials of blocks of classes are added without a common scale",
        "layers/cross_entropy.py",
        "(sums * (tops - top).exp()).sum(1, True).log()",
        "sums.sum(1, True).log()",
        (LOSSES,),
    ),
    Fault(
        "mean of one block",
        "the mean of a loss is divided by the number of this worker's elements",
        "layers/loss.py",
        "        del T\n        return prod(X.global_shape)",
        "        del T\n        return prod(X.regions[0].shape)",
        (LOSSES,),
    ),
    Fault(
        "interpolation one short",
        "the last input that a worker's interpolated outputs need does not come",
        "layers/resample.py",
        "return int(indices.min()), int(indices.max()) + 1",
        "return int(indices.min()), int(indices.max())",
        (f"{RESAMPLE}::test_upsampling_on_threads",),
    ),
    Fault(
        "padding counted twice",
        "a block's edge of one value begins where the tensor's block ends, without its padding",
        "layers/padding.py",
        "before = here.start + left - there.start",
        "before = max(0, here.start - there.start)",
        (f"{RESAMPLE}::test_padding_on_threads",),
    ),
    # The state of models
    Fault(
        "state to the wrong worker",
        "the state that one worker asks for is gathered on worker 0",
        "layers/state.py",
        "there = Partition((1,), [worker]) if worker is not None",
        "there = Partition((1,), [0]) if worker is not None",
        (STATES,),
    ),
    Fault(
        "state in balanced blocks",
        "state moves to blocks of equal lengths, whatever those of the layer are",
        "layers/state.py",
        "space.axes, space.name, bounds=bounds\n",
        "space.axes, space.name\n",
        (STATES,),
    ),
    Fault(
        "shards at the origin",
        "all blocks of a tensor are saved as its first",
        "layers/sharded.py",
        "offsets = [s.start or 0 for s in part.of(self.worker)]",
        "offsets = [0 for s in part.of(self.worker)]",
        ("test_state.py::test_training_resumes_on_threads",),
    ),
    # What torch does with whole models
    Fault(
        "norms of each worker",
        "gradients are clipped by the norm of a worker's blocks",
        "layers/clipping.py",
        "            if norm.key is None:\n                counted.append(norm)",
        "            if norm.key is None:\n                counted += [norm] * (worker == 0)",
        (STOCK,),
    ),
    Fault(
        "whole gradients twice",
        "what each worker holds whole counts once for every worker",
        "layers/clipping.py",
        "if there == worker:\n                counted.append(norm)",
        "counted.append(norm)\n            if there == worker:\n                pass",
        (STOCK,),
    ),
    Fault(
        "steps skipped alone",
        "a worker skips a step where its own gradients are infinite",
        "layers/scaling.py",
        "if meeting_of(program()).sum(sum(int(flag) for flag in found.values())):",
        "if sum(int(flag) for flag in found.values()):",
        (STOCK,),
    ),
    Fault(
        "initialised by blocks",
        "an initialiser sees this worker's block",
        "layers/initialise.py",
        "whole = torch.empty(space.global_shape, dtype",
        "whole = torch.empty([n + 1 for n in space.global_shape], dtype",
        (STOCK,),
    ),
    Fault(
        "arguments not compared",
        "layers constructed with other arguments are called",
        "layers/meeting.py",
        "compare_arguments(said[0].name, [one.arguments for one in said])",
        "compare_arguments(said[0].name, [said[0].arguments])",
        ("test_layers_agreement.py::test_on_threads",),
    ),
)
