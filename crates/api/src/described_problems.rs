//! Problems in the description of the API: a route describes only those about which it has
//! something to say.

use crate::problem::CONTENT_TYPE;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::{Content, OpenApi, PathItem, Ref, RefOr, Response, ResponseBuilder};

/// The problems of a status.
struct Described {
    status: &'static str,
    /// Name of the response in the description.
    name: &'static str,
    description: &'static str,
    is_possible: fn(&Operation) -> bool,
}

const ALL: [Described; 10] = [
    Described {
        status: "400",
        name: "Invalid",
        description: "The request cannot be understood, or contradicts itself",
        is_possible: |op| op.parameters.is_some() || op.request_body.is_some(),
    },
    Described {
        status: "403",
        name: "Forbidden",
        description: "The client's user may not make this request",
        is_possible: |_| true,
    },
    Described {
        status: "404",
        name: "Unknown",
        description: "The disk, or another object that the request names, does not exist",
        is_possible: names_object,
    },
    Described {
        status: "408",
        name: "Slow",
        description: "The request's body was not received in time",
        is_possible: |op| op.request_body.is_some(),
    },
    Described {
        status: "409",
        name: "Conflict",
        description: "The state of the disk or of another object does not allow the request",
        is_possible: names_object,
    },
    Described {
        status: "412",
        name: "Mismatch",
        description: "The object does not match If-Match or If-None-Match",
        is_possible: |op| has_parameter(op, &ParameterIn::Header),
    },
    Described {
        status: "413",
        name: "TooLarge",
        description: "The request's body is too long",
        is_possible: |op| op.request_body.is_some(),
    },
    Described {
        status: "422",
        name: "Failed",
        description: "The operation was tried and failed",
        is_possible: names_object,
    },
    Described {
        status: "503",
        name: "Unavailable",
        description: "The server is stopping, or too many clients make such requests",
        is_possible: |_| true,
    },
    Described {
        status: "504",
        name: "Late",
        description: "The operation takes long, and continues",
        is_possible: names_object,
    },
];

fn names_object(operation: &Operation) -> bool {
    has_parameter(operation, &ParameterIn::Path)
}

fn has_parameter(operation: &Operation, place: &ParameterIn) -> bool {
    let parameters = operation.parameters.iter().flatten();
    parameters.into_iter().any(|parameter| match parameter {
        RefOr::T(Parameter { parameter_in, .. }) => parameter_in == place,
        RefOr::Ref(_) => false,
    })
}

/// Adds to all operations the problems with which they may end.
pub fn describe(api: &mut OpenApi) {
    let responses = ALL.iter().map(|one| {
        let response = ResponseBuilder::new().description(one.description);
        let response = response.content(CONTENT_TYPE, problem()).build();
        (one.name.to_owned(), RefOr::T(response))
    });
    let components = api.components.get_or_insert_default();
    components.responses.extend(responses);
    for operation in api.paths.paths.values_mut().flat_map(operations) {
        complete(operation);
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let all = [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
        &mut item.patch,
    ];
    all.into_iter().flatten()
}

fn complete(operation: &mut Operation) {
    let described = &mut operation.responses.responses;
    for (status, response) in described.iter_mut() {
        if let RefOr::T(Response { content, .. }) = response
            && status.starts_with(['4', '5'])
        {
            content.insert(CONTENT_TYPE.to_owned(), RefOr::T(problem()));
        }
    }
    for one in &ALL {
        if !operation.responses.responses.contains_key(one.status) && (one.is_possible)(operation) {
            let response = RefOr::Ref(Ref::from_response_name(one.name));
            let responses = &mut operation.responses.responses;
            responses.insert(one.status.to_owned(), response);
        }
    }
}

fn problem() -> Content {
    Content::new(Some(Ref::from_schema_name("Problem")))
}
