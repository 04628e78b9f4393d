"""The contract suite over every installed endpoint."""

import pytest

from jackfield.testing import ContractCase, contract_cases


@pytest.mark.parametrize("case", contract_cases(), ids=str)
def test_contract(case: ContractCase) -> None:
    case.run()
