# SPDX-License-Identifier: Apache-2.0
# The kernels for GPUs: compiled here, so that nothing is compiled at run time. By nvcc; where there is none, by NVRTC, which
# CUDA builds of torch bring along. OFFLOAD_CUDA_DESTINATION: the package that they are installed into.
set(OFFLOAD_CUDA_DESTINATION offload CACHE STRING "The package that the CUDA kernels are installed into")
set(offload_kernels_source ${CMAKE_CURRENT_LIST_DIR}/../offload/device/arithmetic/cuda_kernels/kernels.cu)
find_program(OFFLOAD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(OFFLOAD_NVCC)
  set(offload_kernels ${CMAKE_CURRENT_BINARY_DIR}/offload_cuda_kernels.fatbin)
  add_custom_command(
    OUTPUT ${offload_kernels}
    COMMAND ${OFFLOAD_NVCC} -fatbin -arch=all-major -std=c++17 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
            -allow-unsupported-compiler --threads 0 -o ${offload_kernels} ${offload_kernels_source}
    DEPENDS ${offload_kernels_source}
    COMMENT "Compiling the CUDA kernels")
  add_custom_target(offload_cuda_kernels ALL DEPENDS ${offload_kernels})
  install(FILES ${offload_kernels} DESTINATION ${OFFLOAD_CUDA_DESTINATION})
  message(STATUS "offload: CUDA kernels compiled by ${OFFLOAD_NVCC}")
else()
  find_package(Python REQUIRED COMPONENTS Interpreter)
  add_custom_command(
    OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cubins.stamp
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/compile_kernels.py ${offload_kernels_source} ${CMAKE_CURRENT_BINARY_DIR}
    COMMAND ${CMAKE_COMMAND} -E touch ${CMAKE_CURRENT_BINARY_DIR}/cubins.stamp
    DEPENDS ${offload_kernels_source} ${CMAKE_CURRENT_LIST_DIR}/compile_kernels.py
    COMMENT "Compiling the CUDA kernels with NVRTC")
  add_custom_target(offload_cuda_kernels ALL DEPENDS ${CMAKE_CURRENT_BINARY_DIR}/cubins.stamp)
  install(DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/ DESTINATION ${OFFLOAD_CUDA_DESTINATION}
          FILES_MATCHING PATTERN "offload_cuda_kernels.*.cubin" PATTERN CMakeFiles EXCLUDE)
  message(STATUS "offload: nvcc not found, CUDA kernels compiled by NVRTC of ${Python_EXECUTABLE}")
endif()
