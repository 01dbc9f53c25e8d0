"""The paper's claims, tried one by one: set-ups, evidence, verdicts, and the page about them."""

from sim.study.paper.page import claims_frame, markdown, worlds_frame, write
from sim.study.paper.reproduce import Reproduction, reproduce, size_named

__all__ = ["Reproduction", "claims_frame", "markdown", "reproduce", "size_named", "worlds_frame", "write"]
