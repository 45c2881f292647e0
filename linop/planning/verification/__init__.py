"""Static verification of plans: proofs without running them, one error class per fault."""
