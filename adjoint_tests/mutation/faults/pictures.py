"""Faults of pictures and of predicted timelines."""

from __future__ import annotations

from mutation.fault import Fault

PICTURES = (
    Fault(
        "arrows from the first holder",
        "an arrow of a replicated region begins at its first holder, not at the one that sends",
        "replication",
        "linop.pictures.scene:_shown",
        "int(every.sender[first])",
        "transfers[0].source.workers[0]",
        ("test_drawn_operators.py::test_arrows_are_the_entries_of_the_transfer_table",),
    ),
    Fault(
        "sums unseen",
        "terms of a sum are drawn as if each overwrote the others",
        "overwriting",
        "linop.pictures.scene:_overlapping",
        "meet.any(axis=1)",
        "meet.all(axis=1)",
        ("test_drawn_operators.py::test_arrows_that_add_are_those_whose_targets_overlap",),
    ),
    Fault(
        "markup of users",
        "names that users give are written into a picture as they are",
        "omission",
        "linop.svg:escaped",
        'escape(_NO_XML.sub("\\ufffd", text), quote=True)',
        '_NO_XML.sub("\\ufffd", text)',
        ("test_drawn_operators.py::test_names_are_text_and_no_markup",),
    ),
    Fault(
        "sends without their stretch",
        "messages of a timeline are as short as if no other shared their machine's link",
        "coefficient",
        "linop.planning.prediction.timeline:_watched",
        "(gone - begun) / total if total else 0.0",
        "1.0",
        ("test_drawn_timelines.py::test_a_timeline_is_the_simulation",),
    ),
    Fault(
        "halos of the wrong side",
        "the parts of a block are drawn where they are in the sender's block",
        "address",
        "linop.pictures.halos:parts_of",
        "(coming.table.at, coming.table.extent)",
        "(coming.table.of, coming.table.extent)",
        ("test_drawn_halos.py::test_parts_are_the_bulk_and_the_halos_of_the_geometry",),
    ),
)
