# SPDX-License-Identifier: Apache-2.0
"""python -m offload.deepspeed script.py args: the script with `import deepspeed` answered by the drop-in."""

from __future__ import annotations

from offload.deepspeed.launching import main

if __name__ == "__main__":
    main()
