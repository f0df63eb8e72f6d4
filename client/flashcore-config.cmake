# find_package(flashcore CONFIG): flashcore::client, the C++ library, and flashcore::c, the C library.
cmake_minimum_required(VERSION 3.23)  # for file sets
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(absl CONFIG)
find_dependency(Protobuf)  # Debian ships no ProtobufConfig.cmake: module mode
find_dependency(gRPC CONFIG)
include(${CMAKE_CURRENT_LIST_DIR}/flashcore-targets.cmake)
