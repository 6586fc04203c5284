# LibTorch is the torch wheel of a virtual environment; nothing imports it to find it.
#
#   kvferry_torch_libs   what C++ on tensors links: libtorch_cpu, libc10 and torch's own OpenMP runtime
#   kvferry_pybind       pybind11's and Python's headers; one pybind11 for all of our modules, so that they share types
#   kvferry_torch_python kvferry_torch_libs and kvferry_pybind, with the tensor casters of libtorch_python
#   kvferry_python_module(NAME SOURCES... DEPS...)   build/<preset>/python/kvferry/NAME.so
#
# find_package(Torch) is not used: it asks for a CUDA toolkit and redefines protobuf's targets.

set(KVFERRY_PYTHON ${CMAKE_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "Python whose torch wheel is LibTorch")

execute_process(
  COMMAND ${KVFERRY_PYTHON} -c "import importlib.util as u, os, sysconfig as s
spec = u.find_spec('torch')
print(os.path.dirname(spec.origin) if spec else '', s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';')"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "KVFERRY_PYTHON=${KVFERRY_PYTHON} does not run: `./dev setup` makes it, "
                      "or build without tensors: -DKVFERRY_TORCH=OFF")
endif()
list(GET found 0 torch_dir)
list(GET found 1 python_include)
list(GET found 2 KVFERRY_EXTENSION_SUFFIX)
if(NOT EXISTS ${torch_dir}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "${KVFERRY_PYTHON} has no torch with lib/libtorch_cpu.so (found \"${torch_dir}\"): `./dev setup` "
                      "installs it, or build without tensors: -DKVFERRY_TORCH=OFF")
endif()
message(STATUS "torch: ${torch_dir}")

# Our at::parallel_for is serial without -fopenmp. It is not given to the linker, which would take the compiler's
# runtime: torch's libgomp.so.1 comes first in the search path, and one SONAME is loaded once.
add_library(kvferry_torch_libs INTERFACE)
target_include_directories(kvferry_torch_libs SYSTEM INTERFACE
                           ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
target_compile_options(kvferry_torch_libs INTERFACE -fopenmp)
target_link_directories(kvferry_torch_libs INTERFACE ${torch_dir}/lib)
target_link_libraries(kvferry_torch_libs INTERFACE
                      ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so ${torch_dir}/lib/libgomp.so.1)
# The wheel's libraries name NCCL, CUPTI and others that their own RPATH finds at run time.
target_link_options(kvferry_torch_libs INTERFACE -Wl,--allow-shlib-undefined)

add_library(kvferry_pybind INTERFACE)
target_include_directories(kvferry_pybind SYSTEM INTERFACE ${torch_dir}/include ${python_include})
target_compile_options(kvferry_pybind INTERFACE -fvisibility=hidden)

add_library(kvferry_torch_python INTERFACE)
target_link_libraries(kvferry_torch_python INTERFACE
                      kvferry_torch_libs kvferry_pybind ${torch_dir}/lib/libtorch.so ${torch_dir}/lib/libtorch_python.so)

function(kvferry_python_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} MODULE ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} kvferry_pybind kvferry_flags)
  set_target_properties(${name} PROPERTIES
                        PREFIX "" SUFFIX ${KVFERRY_EXTENSION_SUFFIX}
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/python/kvferry)
endfunction()
