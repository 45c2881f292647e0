"""Movements of a step, forward and backward, as operators between spaces: proofs that one is the
adjoint of the other, or counterexamples."""
