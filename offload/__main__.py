# SPDX-License-Identifier: Apache-2.0
"""`python -m offload`."""

import sys

from offload.cli.main import main

sys.exit(main())
