#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <utility>

namespace layerstream::test {

/// Message of the exception of type E that `call` must throw; anything else is a test failure.
template <class E, class Call>
std::string message_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no exception";
  return "";
}

}  // namespace layerstream::test
