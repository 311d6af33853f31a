# SPDX-License-Identifier: Apache-2.0
"""`import deepspeed` where this folder is on the path: the drop-in takes the name's place."""

import offload.deepspeed

offload.deepspeed.install(shadow=True)
