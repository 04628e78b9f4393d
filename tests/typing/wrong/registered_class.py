from jackfield import Endpoint, EndpointRegistry, Request, hookimpl


class Echo(Endpoint[Request, str]):
    pass


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    registry.add(Echo)  # E: Argument 1 to "add" of "EndpointRegistry" has incompatible type "type[Echo]"; expected "Endpoint[Any, Any]"
