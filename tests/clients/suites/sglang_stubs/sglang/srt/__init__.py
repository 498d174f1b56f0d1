"""Everything but `utils` is the checkout's."""

import os

__path__.append(os.path.join(os.environ["SGLANG_ROOT"], "python", "sglang", "srt"))
