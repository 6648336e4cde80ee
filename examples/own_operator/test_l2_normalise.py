import pytest
from l2_normalise import l2_normalise

from liger_kernel.operator_checks import checks_of


@pytest.mark.parametrize("check", checks_of(l2_normalise))
def test_l2_normalise(check):
    check()
