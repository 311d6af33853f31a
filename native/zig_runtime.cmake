# SPDX-License-Identifier: Apache-2.0
# For native/wheel.sh. What this library uses of zig's C++ library, compiled beside it. zig by itself would compile all of it, one file
# after another, which takes longer than everything else. OFFLOAD_ZIG_LIB is zig's folder "lib"; its compiler links with -nostdlib++.
# What is missing here the linker names (--no-undefined).
set(cxx "${OFFLOAD_ZIG_LIB}/libcxx")
set(abi "${OFFLOAD_ZIG_LIB}/libcxxabi")
set(cxx_sources
  chrono condition_variable condition_variable_destructor error_category exception functional future hash memory mutex mutex_destructor
  new_handler new_helpers stdexcept string system_error thread verbose_abort)
set(abi_sources
  abort_message cxa_aux_runtime cxa_default_handlers cxa_exception cxa_exception_storage cxa_guard cxa_handlers cxa_personality
  cxa_virtual fallback_malloc private_typeinfo stdlib_exception stdlib_new_delete stdlib_stdexcept stdlib_typeinfo)
list(TRANSFORM cxx_sources REPLACE "(.+)" "${cxx}/src/\\1.cpp")
list(TRANSFORM abi_sources REPLACE "(.+)" "${abi}/src/\\1.cpp")

add_library(zig_cxx OBJECT ${cxx_sources})
target_compile_definitions(zig_cxx PRIVATE _LIBCPP_BUILDING_LIBRARY LIBCXX_BUILDING_LIBCXXABI)
target_include_directories(zig_cxx PRIVATE "${cxx}/src" "${cxx}/libc" "${abi}/include")

add_library(zig_cxxabi OBJECT ${abi_sources})
target_compile_definitions(zig_cxxabi PRIVATE _LIBCXXABI_BUILDING_LIBRARY _LIBCPP_BUILDING_LIBRARY LIBCXXABI_NON_DEMANGLING_TERMINATE)
target_include_directories(zig_cxxabi PRIVATE "${abi}/include" "${cxx}/src")

foreach(part zig_cxx zig_cxxabi)
  set_target_properties(${part} PROPERTIES CXX_STANDARD 23 CXX_STANDARD_REQUIRED OFF)
  target_compile_options(${part} PRIVATE -Os -w) # nothing in it counts for speed
  target_sources(offload_native PRIVATE $<TARGET_OBJECTS:${part}>)
endforeach()
