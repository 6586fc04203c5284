# kvferry_library(NAME SOURCES... DEPS...): a static library with the project's warnings and sanitizers.
# kvferry_executable(...), kvferry_test(...): likewise; a test links gmock and registers with CTest. A test marked TSAN
# reaches no gRPC call and runs under ThreadSanitizer too (Debian's gRPC and Abseil are not instrumented: false races).
# kvferry_fuzz(...): a libFuzzer target, built in the fuzz preset alone.

add_library(kvferry_flags INTERFACE)
target_include_directories(kvferry_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(kvferry_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-fno-omit-frame-pointer>")
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  target_compile_options(kvferry_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety>)
endif()
if(KVFERRY_SANITIZE)
  target_compile_options(kvferry_flags INTERFACE
                         "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${KVFERRY_SANITIZE};-fno-sanitize-recover=all>")
  target_link_options(kvferry_flags INTERFACE -fsanitize=${KVFERRY_SANITIZE})
endif()
if(KVFERRY_FUZZ)
  target_compile_options(kvferry_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

add_custom_target(kvferry_tsan_tests)
add_custom_target(kvferry_fuzz_targets)

function(kvferry_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE kvferry_flags)
  target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR})
  if(KVFERRY_SANITIZE)
    target_link_options(${name} PUBLIC -fsanitize=${KVFERRY_SANITIZE})
  endif()
endfunction()

function(kvferry_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} kvferry_flags)
endfunction()

function(kvferry_test name)
  cmake_parse_arguments(ARG "TSAN" "" "SOURCES;DEPS" ${ARGN})
  kvferry_executable(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
  if(ARG_TSAN)
    set_tests_properties(${name} PROPERTIES
      LABELS tsan
      ENVIRONMENT "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp")
    add_dependencies(kvferry_tsan_tests ${name})
  endif()
endfunction()

function(kvferry_fuzz name)
  if(NOT KVFERRY_FUZZ)
    return()
  endif()
  kvferry_executable(${name} ${ARGN})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
  add_dependencies(kvferry_fuzz_targets ${name})
endfunction()
