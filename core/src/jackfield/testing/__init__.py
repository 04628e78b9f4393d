"""For tests of endpoints and plugins: a deterministic engine, a real server around them, and the contract that every endpoint keeps.

from jackfield.testing import make_client

def test_answers():
    with make_client(MyEndpoint()) as client:
        assert client.post("/my/route", json={"input": "hello"}).status_code == 200
"""

from jackfield.testing.contract import ContractCase, contract_cases
from jackfield.testing.engine import FakeEngine
from jackfield.testing.events import read_events
from jackfield.testing.server import RunningServer, make_client, make_server
from jackfield.tiny import tiny_model

__all__ = ["ContractCase", "FakeEngine", "RunningServer", "contract_cases", "make_client", "make_server", "read_events", "tiny_model"]
