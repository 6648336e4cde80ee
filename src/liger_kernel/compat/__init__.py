"""Names of LinkedIn's package that are not operators of ours: functions, classes and helpers over
``liger_kernel.ops``, by the names, parameters and defaults of that package.

Import paths are in ``liger_kernel._legacy``, and ``tests/published_names.txt`` lists what that
package offers.
"""

import liger_kernel.ops  # noqa: F401  first: it imports parts of this package when it is complete
