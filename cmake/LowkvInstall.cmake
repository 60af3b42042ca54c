# Installation: the library with its CMake package, the plug-in and the command.
if(LOWKV_CORE)
    return()
endif()
include(CMakePackageConfigHelpers)

set(lowkv_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/lowkv")
install(TARGETS ${lowkv_libraries} EXPORT lowkv-targets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT lowkv)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/lowkv" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT lowkv)
install(EXPORT lowkv-targets NAMESPACE lowkv:: DESTINATION "${lowkv_package_dir}" COMPONENT lowkv)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/lowkv-config.cmake.in"
    "${PROJECT_BINARY_DIR}/lowkv-config.cmake" INSTALL_DESTINATION "${lowkv_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/lowkv-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/lowkv-config.cmake" "${PROJECT_BINARY_DIR}/lowkv-config-version.cmake"
    DESTINATION "${lowkv_package_dir}" COMPONENT lowkv)

# The plug-in finds ggml in the program that loads it; the command finds llama.cpp where it was built.
if(TARGET ggml-lowkv)
    install(TARGETS ggml-lowkv LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT tools)
endif()
if(TARGET lowkv_cli)
    set_property(TARGET lowkv_cli PROPERTY INSTALL_RPATH "${LOWKV_LLAMA_BUILD}")
    install(TARGETS lowkv_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT tools)
    install(FILES "${PROJECT_SOURCE_DIR}/cli/compare/plot_compare.py" DESTINATION "${CMAKE_INSTALL_DATADIR}/lowkv" COMPONENT tools)
endif()
