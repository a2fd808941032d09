//! `#[guarded]`: functions that Python calls, whose panics become exceptions.

use proc_macro::{Delimiter, Group, Spacing, TokenStream, TokenTree};

/// Has a function, or every function of an `impl`, return a panic as an error. The name of the function that
/// does it is `crate::panics::guard`; a function that returns no `PyResult` returns one from now on.
///
/// It stands above `#[pymethods]` and `#[pyfunction]`, which see the guarded functions.
#[proc_macro_attribute]
pub fn guarded(_: TokenStream, item: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = item.into_iter().collect();
    let begins = |name: &str| tokens.iter().position(|token| is_word(token, name)).unwrap_or(usize::MAX);
    if begins("impl") > begins("fn") {
        return guard_functions(tokens);
    }
    let Some(TokenTree::Group(body)) = tokens.pop() else { panic!("an impl ends with its functions") };
    let functions = guard_functions(body.stream().into_iter().collect());
    tokens.push(Group::new(Delimiter::Brace, functions).into());
    tokens.into_iter().collect()
}

/// Guards every function among the items.
fn guard_functions(items: Vec<TokenTree>) -> TokenStream {
    let (mut guarded, mut signature) = (Vec::new(), Vec::new());
    for token in items {
        match token {
            TokenTree::Group(body) if body.delimiter() == Delimiter::Brace && !signature.is_empty() => {
                guarded.extend(guard_function(std::mem::take(&mut signature), body));
            }
            token if !signature.is_empty() || is_word(&token, "fn") => signature.push(token),
            token => guarded.push(token),
        }
    }
    guarded.into_iter().collect()
}

/// The function with a body that is run by the guard.
fn guard_function(mut signature: Vec<TokenTree>, body: Group) -> Vec<TokenTree> {
    let arrow = signature.windows(2).position(|pair| {
        matches!(pair, [TokenTree::Punct(line), TokenTree::Punct(head)]
        if line.as_char() == '-' && line.spacing() == Spacing::Joint && head.as_char() == '>')
    });
    let returned = match arrow {
        Some(arrow) => signature.split_off(arrow).into_iter().skip(2).collect(),
        None => parsed("()"),
    };
    let fails = returned.clone().into_iter().next().is_some_and(|token| is_word(&token, "PyResult"));
    let guard = if fails { "crate::panics::guard" } else { "crate::panics::guard_value" };
    signature.extend(parsed("->"));
    if fails {
        signature.extend(returned.clone());
    } else {
        signature.extend(parsed("::pyo3::PyResult<"));
        signature.extend(returned.clone());
        signature.extend(parsed(">"));
    }
    let mut closure = parsed("|| ->");
    closure.extend(returned);
    closure.extend([TokenTree::from(body)]);
    let mut call = parsed(guard);
    call.extend([TokenTree::from(Group::new(Delimiter::Parenthesis, closure))]);
    signature.push(Group::new(Delimiter::Brace, call).into());
    signature
}

fn parsed(source: &str) -> TokenStream {
    source.parse().expect("it is Rust")
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(name) if name.to_string() == word)
}
